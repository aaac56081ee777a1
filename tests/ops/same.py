"""Bitwise repetition: in a second run, and on any number of threads."""

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


def assert_threads_do_not_show(op: str, kw: dict) -> None:
    """Check on `cpu` that 1, 2 and 5 threads give the same bits."""
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            torch.manual_seed(1)
            results.append(compare.run(op, kw, "cpu"))
    finally:
        torch.set_num_threads(threads)
    for name, value in results[0].items():
        assert all(torch.equal(other[name], value) for other in results[1:]), name
