"""Small problems for the Triton kernels of the relative ops: every option, tile edges, skipped tiles."""

import pytest
import torch

from tests import compare, inputs
from tests.conftest import INTERPRETER

OP = "relative_logits"
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETER else [torch.bfloat16])

LOGITS = {
    "all": dict(),
    "shared": dict(heads="shared"),
    "no bias": dict(biases=False),
    "several tiles": dict(N=70, key_len=85, B=1, H=1),
    "more keys": dict(N=3, key_len=40, query_offset=11),
    "table": dict(E=1),
    "odd width": dict(E=5, N=20),
    "bounded": dict(rel_start=-2, T=4),
    "bounded, several tiles": dict(rel_start=0, T=33, N=70, key_len=70, B=1, H=2, heads="shared"),
    "outside": dict(rel_start=400, T=4),
    "far outside": dict(rel_start=-400, T=4),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOGITS)
def test_logits(backend, name, dtype):
    compare.check(OP, inputs.relative_logits(3, dtype=dtype, **LOGITS[name]), backend)
