"""Linear maps in the harness: their cases and work. The baseline is torch's own product."""

from ..registry import Contender, Later, Operator, Work
from . import _shared as shared

OP = "linear"

CASES = [
    shared.case(OP, name, source, f"B=1 N=2048 I=1024 J={width}", **shared.FLOAT32_ON_CPU)
    for name, width, source in (
        ("square", 1024, "attention's projections, a width of 1024"),
        ("inner", 4096, "a feed-forward layer's first map, a width of 1024"),
    )
]


def work(case, itemsize: int, mode: str) -> Work:
    n, i, j = case.shape["B"] * case.shape["N"], case.shape["I"], case.shape["J"]
    forward = Work(2.0 * n * i * j, (n * i + i * j + j + n * j) * itemsize)
    # reads both matrices and d(y) once each, writes the three gradients
    backward = Work(4.0 * n * i * j, (2 * n * i + 2 * i * j + j + n * j) * itemsize)
    return forward + backward if mode == "fwdbwd" else forward


OPERATOR = Operator(OP, ("y",), ("input", "weight", "bias"), shared.drawn("linear", "BNIJ"), shared.outputs(OP), work)
BASELINES = (Contender(OP, "eager", Later("torch.nn.functional:linear")),)
