"""Package `retro_kernels`, `retro_model` and `retro_bench`. tools/build_extensions.py compiles the extensions."""

import os
import sys
from pathlib import Path

from setuptools import find_packages, setup

sys.path.insert(0, str(Path(__file__).resolve().parent))  # pip runs this file without its folder in sys.path

from tools.build_extensions import Build, extensions

PACKAGES = [*find_packages(include=["retro_kernels*", "retro_model*"]), *find_packages("bench")]
PLACES = {"retro_bench": "bench/retro_bench"}

wanted = [] if os.environ.get("RETRO_KERNELS_NO_EXTENSIONS") else extensions()  # tools/setup.sh compiles them meanwhile
setup(packages=PACKAGES, package_dir=PLACES, ext_modules=wanted, cmdclass={"build_ext": Build})
