"""Random shapes of both attentions, and a check of logits beyond float16."""

import torch
from hypothesis import strategies as st

from retro_kernels.testing import compare, inputs

#: shape, positions, biases, heads and seed
ATTENTION = dict(
    B=st.integers(1, 2),
    N=st.integers(1, 40),
    D=st.sampled_from([16, 24, 40, 64]),
    E=st.sampled_from([None, 1, 3, 16]),
    biases=st.booleans(),
    heads=st.sampled_from(["each", "shared"]),
    rel=st.sampled_from([None, "all", "bounded"]),
    rel_start=st.integers(-30, 30),
    T=st.integers(1, 40),
    grouping=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    seed=st.integers(0, 99),
)
#: one token of one head
SMALLEST = dict(B=1, N=1, D=16, E=None, biases=True, heads="each", rel="all", rel_start=0, T=1, grouping=(1, 1), seed=0)


def assert_large_logits_pass(op, kw: dict, backend: str) -> None:
    """Check out and lse of float16 inputs whose logits, also those of positions, exceed the 65504 of float16."""
    kw = kw | {name: kw[name] * 200 for name in ("query", "key", "rel_key") if kw.get(name) is not None}
    out, lse = op(**kw, return_lse=True, backend=backend)
    want, want_lse = op(**inputs.cast(kw, torch.float64), return_lse=True, backend="reference")
    assert lse.abs()[lse.isfinite()].max() > 65504
    compare.assert_passes("out", out, want, None, torch.float16)
    compare.assert_passes("lse", lse, want_lse, None, torch.float16)
