"""Put the compiled emulator into wheels; any other installation compiles it at first use."""

import sys

from setuptools import Extension, setup

LIBRARY = Extension(
    "ptx_emulator.ptx",
    ["src/ptx_emulator/emulator.cpp"],
    extra_compile_args=["-std=c++17", "-O3", "-g0", "-mavx2", "-mbmi2", "-mf16c", "-mfma"],
    py_limited_api=True,
    optional=True,  # another processor
)
setup(
    ext_modules=[LIBRARY] if "bdist_wheel" in sys.argv else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
