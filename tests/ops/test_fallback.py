"""Where the extension is missing the reference serves, says so once, and says what to do."""

import subprocess
import sys

import pytest

CODE = """
import sys, warnings, torch
sys.modules["retro_kernels._cpu"] = None  # what an import finds where it was not built
import retro_kernels as rk
x = torch.randn(1, 4, 1, 8)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    BODY
print(*[str(one.message) for one in said if one.category is RuntimeWarning], sep="\\n")
"""


def warnings_of(body: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", CODE.replace("BODY", body)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_said_once_with_the_remedy():
    (said,) = warnings_of("[rk.leaky_average(x, torch.full((1,), 0.5)) for _ in range(3)]")
    assert "leaky_average" in said and "retro_kernels._cpu was not built (python setup.py build_ext --inplace" in said


@pytest.mark.parametrize(
    "body",
    [
        "rk.leaky_average(x, torch.full((1,), 0.5), backend='reference')",
        "rk.leaky_average(x.double(), torch.full((1,), 0.5).double())",
        "rk.leaky_average(x[:, :0], torch.full((1,), 0.5))",
    ],
    ids=["asked for", "float64", "empty"],
)
def test_silent_where_no_kernel_is_missed(body):
    assert warnings_of(body) == [""]
