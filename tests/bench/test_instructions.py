"""Instruction counts of the C++ kernels: what is recorded, what the
closing words say, and that twice the work counts twice.
"""

import pytest
import torch

import retro_kernels as rk
from bench.measure import instructions
from retro_kernels.core import native

pytestmark = pytest.mark.skipif(native.unavailable("_cpu") is not None, reason="the C++ extension is not built")


def average(steps):
    x, decay = torch.randn(1, steps, 2, 64), torch.rand(2)
    return lambda: rk.leaky_average(x, decay, backend="cpu")


def test_calls_are_recorded_with_their_inputs():
    call = average(8)
    before = call()
    ((name, arguments),) = instructions.record(call)
    assert name == "leaky_average_forward" and arguments[2] is None and isinstance(arguments[-1], int)
    word, memory, kind, sizes, _ = arguments[0]
    assert (word, kind, sizes, len(memory)) == ("view", 1, (1, 8, 2, 64), 8 * 128 * 4)
    assert torch.equal(call(), before) and native.extension("_cpu").__name__.endswith("_cpu")
    assert instructions.record(lambda: None) == []


def test_every_op_is_recorded_without_an_address():
    """An address of this process, replayed in another, would be a crash: views in nested tuples are found too."""

    def views(argument):
        assert not (isinstance(argument, tuple) and len(argument) == 4), argument
        if isinstance(argument, tuple) and argument[:1] == ("view",):
            return 1
        return sum(map(views, argument)) if isinstance(argument, tuple) else 0

    query, key = torch.randn(1, 64, 2, 16), torch.randn(1, 1, 2, 8, 2, 16)
    calls = (
        lambda: rk.relative_logits(query, torch.randn(2, 127, 16), key_len=64, backend="cpu"),
        lambda: rk.relative_attention(query, query, query, causal=True, backend="cpu"),
        lambda: rk.chunked_cross_attention(query, key, key, chunk_len=64, backend="cpu"),
        lambda: rk.topk_chunks(query[:, :, 0], query[:, :, 1], 4, backend="cpu"),
    )
    for call in calls:
        recorded = instructions.record(call)
        assert recorded and all(sum(map(views, arguments)) >= 3 for _, arguments in recorded)


def test_without_valgrind_the_count_is_missing_and_says_why(monkeypatch):
    monkeypatch.setattr(instructions.shutil, "which", lambda name: None)
    assert instructions.unavailable() == "valgrind is not installed" and instructions.count(average(8)) is None


def test_the_closing_words_are_read():
    assert instructions.collected("==7== \n==7== Collected : 1234567\n==7== ") == 1234567
    assert instructions.collected("valgrind: failed to start tool") is None


@pytest.mark.skipif(instructions.unavailable() is not None, reason=str(instructions.unavailable()))
def test_as_many_steps_more_are_as_many_instructions_more():
    counts = [instructions.count(average(steps)) for steps in (512, 1024, 1536)]
    assert {c["isa"] for c in counts} == {"avx2"} and {c["threads"] for c in counts} == {1}
    first, second, third = (c["instructions"] for c in counts)
    vectors = 512 * 128 // 8  # of eight floats: each is at least loaded, multiplied and stored
    assert second - first > 3 * vectors
    assert third - second == pytest.approx(second - first, rel=0.1)
