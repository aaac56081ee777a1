"""Each kernel compiles with the oldest triton that pyproject.toml allows, which `make test` installs into .venv/oldest.

With RETRO_KERNELS_EVERY_LAUNCH=1 every launch does. The oldest may refuse a construct that the newest accepts, e.g.
None in a tuple.
"""

import re

import pytest

from retro_kernels.compile import aot
from retro_kernels.compile.target import KNOWN
from tests.conftest import INTERPRETER
from tests.fresh import ROOT, python

OLDEST = ROOT / ".venv" / "oldest"
MINIMUM = re.search(r'"triton>=([0-9.]+);', (ROOT / "pyproject.toml").read_text())[1]


@pytest.mark.skipif(INTERPRETER, reason="a process under TRITON_INTERPRET can't compile")
@pytest.mark.skipif(
    not (OLDEST / "triton").exists(),
    reason=f"no triton {MINIMUM} in {OLDEST.relative_to(ROOT)}: `make test` puts it there",
)
def test_every_kernel_compiles_with_the_oldest_triton():
    version, *kernels = python("-m", __name__, PYTHONPATH=str(OLDEST)).split()
    assert version.startswith(MINIMUM + ".")
    assert set(kernels) == {case.launch.name for _, case in aot.cases(KNOWN[90])}


if __name__ == "__main__":
    import triton

    from tests.aot.test_aot import EVERY

    first: dict[tuple, aot.CompileCase] = {}  # first case of each kernel, in float32 and in a half type

    def kept(op: str, case: aot.CompileCase) -> bool:
        return EVERY or first.setdefault((op, case.launch.name, case.dtype == "float32"), case) is case

    print(triton.__version__)
    for row in aot.compile_each([90], select=kept):
        print(row.kernel)
