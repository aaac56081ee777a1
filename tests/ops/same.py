"""Bitwise repetition in a second run."""

import torch

from retro_kernels.testing import compare


def assert_repeats(op: str, kw: dict, backend: str) -> None:
    """Check that two runs of one seed are equal to the bit; with dropout another seed gives another output."""
    runs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        runs.append(compare.run(op, kw, backend))
    for name, value in runs[0].items():
        assert torch.equal(runs[1][name], value), name
    assert not torch.equal(runs[2]["out0"], runs[0]["out0"])
