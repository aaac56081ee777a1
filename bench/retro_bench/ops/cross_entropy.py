"""Cross-entropy in the harness: its case and work. The baseline is torch's own."""

from ..registry import Contender, Later, Operator, Work
from . import _shared as shared

OP = "cross_entropy"

CASES = [shared.case(OP, "readout", "a part of a readout's logits", "N=512 V=32000", **shared.FLOAT32_ON_CPU)]


def work(case, itemsize: int, mode: str) -> Work:
    logits = shared.product(case, "NV")
    forward = Work(3.0 * logits, logits * itemsize)
    # backward: reads the logits again, writes their gradient
    return forward if mode != "fwdbwd" else forward + Work(4.0 * logits, 2 * logits * itemsize)


OPERATOR = Operator(OP, ("losses",), ("input",), shared.drawn("entropy", "NV"), shared.outputs(OP), work)
BASELINES = (Contender(OP, "eager", Later("torch.nn.functional:cross_entropy")),)
