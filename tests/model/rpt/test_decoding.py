"""Decoding with a cache equals the whole, for any blocks and positions of rows; the growing index."""

import copy
import os

import pytest
import torch

from retro_kernels.testing import assert_passes, relative_error, tolerances
from retro_model import generate
from retro_model.rpt import OWN, RPTCache, SelfIndex
from tests.model.rpt import tiny
from tests.model.toys import in_blocks
from tests.refusals import refused

EXACT = tolerances.FLOOR[torch.float64]
N, M = 43, 4


BLOCKS = [[1] * N, [N], [3, 1, 4, 6, 9, 20], [17, *[1] * 26], [16, 8, 19], [7, 36]]


def test_segments_that_are_no_multiple_of_a_chunk():
    model, tokens = tiny.model(segment=6, num_layers=3, cca_layers=(3,)), tiny.tokens(N)
    want = model(tokens)
    for blocks in ([1] * N, [17, 5, 21]):
        assert relative_error(in_blocks(model, model.make_cache(2), tokens, blocks), want) < EXACT


SWITCHED = {"window": "sliding", "null_slot": True, "excluded_chunks": 1, "query_norm": True}


@pytest.mark.parametrize(("changes", "blocks"), [*(({}, b) for b in BLOCKS), *((SWITCHED, b) for b in BLOCKS[2:5])])
def test_blocks_equal_the_whole(blocks, changes):
    model, tokens = tiny.model(**changes), tiny.tokens(N)
    want = model(tokens)
    for capacity in (None, N):
        cache = model.make_cache(2, capacity)
        assert relative_error(in_blocks(model, cache, tokens, blocks), want) < EXACT
        assert cache.positions == [N, N]


@pytest.mark.parametrize("blocks", [[1] * N, [5, 14, 24]], ids=len)
def test_given_neighbours(blocks):
    model, tokens = tiny.model(), tiny.tokens(N)
    g = torch.Generator().manual_seed(0)
    index = torch.stack([torch.randint(OWN, max(i, 1), (2, 2), generator=g).clamp(max=i - 1) for i in range(N // M)], 1)
    want = model(tokens, index=index)
    assert relative_error(in_blocks(model, model.make_cache(2), tokens, blocks, given={"index": index}), want) < EXACT
    without = tiny.model(retriever=False)
    index = index.clamp(min=-1)
    got = in_blocks(without, without.make_cache(2), tokens, blocks, given={"index": index})
    assert relative_error(got, without(tokens, index=index)) < EXACT


def test_retrieval_off_and_the_plain_decoder():
    for model in (tiny.model(), tiny.model(cca_layers=(), retriever=False)):
        tokens = tiny.tokens(N)
        want = model(tokens, retrieval=False)
        got = in_blocks(model, model.make_cache(2), tokens, [9, *[1] * 34], retrieval=False)
        assert relative_error(got, want) < EXACT


def test_more_neighbours_than_in_training():
    model, tokens = tiny.model(), tiny.tokens(N)
    cache = model.make_cache(2, num_neighbours=4)
    assert relative_error(in_blocks(model, cache, tokens, [9, *[1] * 34]), model(tokens, num_neighbours=4)) < EXACT


@pytest.mark.parametrize("lengths", [(3, 9, 18), (16, 4), (21, 21, 2, 8)], ids=str)
@pytest.mark.parametrize("blocks", [[1] * 12, [2, 1, 9]], ids=len)
def test_rows_of_different_lengths_equal_each_row_alone(lengths, blocks):
    model = tiny.model()
    rows = [tiny.tokens(n + 12, batch=1, seed=i) for i, n in enumerate(lengths)]
    caches = []
    for n, row in zip(lengths, rows):
        caches.append(model.make_cache(1, n))
        model(row[:, :n], cache=caches[-1])
    cache = RPTCache.join(caches, 40)
    assert cache.positions == list(lengths)
    outs, done = [], 0
    for count in blocks:
        outs.append(
            model(torch.cat([row[:, n + done : n + done + count] for n, row in zip(lengths, rows)]), cache=cache)
        )
        done += count
    got = torch.cat(outs, 1)
    for i, (n, row) in enumerate(zip(lengths, rows)):
        assert relative_error(got[i], model(row)[0, n:]) < EXACT, i


def test_generate():
    """Greedy, ragged: each prompt gives its tokens alone, token by token; retrieval off differs."""
    model = tiny.model()
    prompts = [tiny.tokens(n, batch=1, seed=n)[0] for n in (19, 6, 30)]
    got = generate(model, prompts, 14)
    for prompt, text in zip(prompts, got):
        for t in range(len(prompt), len(text)):
            assert model(text[None, :t])[0, -1].argmax() == text[t]
    off = generate(model, prompts, 14, retrieval=False)
    assert any(not torch.equal(a, b) for a, b in zip(got, off))


def test_a_conversation_can_be_copied_and_continued():
    model, tokens = tiny.model(), tiny.tokens(N)
    cache = model.make_cache(2)
    model(tokens[:, :20], cache=cache)
    kept = copy.deepcopy(cache)
    first = model(tokens[:, 20:], cache=cache)
    assert torch.equal(model(tokens[:, 20:], cache=kept), first)


def test_float32_and_autocast():
    tokens = tiny.tokens(N)
    want, index = tiny.model()(tokens), tiny.model().retrieve(tokens)[1]
    model = tiny.model(dtype=torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            whole = model(tokens, index=index)
            got = in_blocks(model, model.make_cache(2), tokens, [9, *[1] * 34], given={"index": index})
        assert_passes("logits", got, want, whole, dtype)


def test_what_grows_is_the_index_and_the_gate():
    model, tokens = tiny.model(), tiny.tokens(43)
    cache = model.make_cache(2)
    model(tokens[:, :20], cache=cache)
    rows, held = {n: t.nbytes for n, t in cache.rows.items()}, len(cache.indexes[0])
    model(tokens[:, 20:], cache=cache)
    assert {n: t.nbytes for n, t in cache.rows.items()} == rows
    assert held == 4 and len(cache.indexes[0]) == 9  # every chunk whose successor is complete


def keys_and_states():
    g = torch.Generator().manual_seed(0)
    return torch.randn(37, 16, generator=g), torch.randn(37, 6, 16, generator=g)


def test_the_index_finds_the_best(monkeypatch):
    monkeypatch.setattr("retro_model.rpt.index.KEYS", 8)
    monkeypatch.setattr("retro_model.rpt.index.STATES", 6)
    keys, states = keys_and_states()
    index = SelfIndex()
    for at in (slice(0, 5), slice(5, 29), slice(29, 37)):
        index.add(keys[at], states[at])
    assert len(index) == 37
    queries = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    for chunk, excluded in ((2, 4), (33, 3), (40, 2)):
        scores, hits = index.search(queries, 4, chunk=chunk, excluded_chunks=excluded)
        for i, query in enumerate(queries):
            there = [j for j in range(37) if j <= chunk + i - excluded]
            want = sorted(there, key=lambda j: -float(query @ keys[j]))[:4]
            assert hits[i].tolist() == want + [-1] * (4 - len(want))
            assert scores[i, : len(want)].tolist() == pytest.approx([float(query @ keys[j]) for j in want], rel=1e-5)
    picked = torch.tensor([[0, 36, -1], [7, 8, 28]])
    assert torch.equal(index.states(picked), states[picked.clamp(min=0)])


def test_the_index_is_saved_restored_and_reset(tmp_path):
    keys, states = keys_and_states()
    index = SelfIndex()
    index.add(keys, states)
    index.save(tmp_path / "index.pt")
    again = SelfIndex.restore(tmp_path / "index.pt")
    hits = [i.search(keys[:3], 2, chunk=37, excluded_chunks=1) for i in (index, again)]
    assert torch.equal(hits[0][1], hits[1][1]) and torch.equal(again.states(hits[1][1]), index.states(hits[0][1]))
    again.add(keys[:1], states[:1])
    assert len(again) == 38 and len(index) == 37
    index.reset()
    assert len(index) == 0 and index.search(keys[:1], 2, chunk=5, excluded_chunks=1)[1].tolist() == [[-1, -1]]
    (tmp_path / "index.pt").write_bytes((tmp_path / "index.pt").read_bytes()[:-50])
    refused("truncated, corrupt or no index", SelfIndex.restore, tmp_path / "index.pt")
    refused(r"none\.pt", SelfIndex.restore, tmp_path / "none.pt", error=FileNotFoundError)
    os.mkfifo(tmp_path / "pipe.pt")
    refused(r"pipe\.pt: expected a regular file", SelfIndex.restore, tmp_path / "pipe.pt")


def test_refuses():
    model, tokens = tiny.model(), tiny.tokens(N)
    cache = model.make_cache(2, 20)
    refused(r"tokens: expected N <= 20 \(capacity = 20\); got N=43", model, tokens, cache=cache)
    model(tokens[:, :6], cache=cache)
    with pytest.raises(ValueError, match="retrieval: expected True, as in this cache's first call"):
        model(tokens[:, 6:7], cache=cache, retrieval=False)
    with pytest.raises(ValueError, match=r"index: expected \[B,L,K\] with K = 2, the cache's; got K=3"):
        model(tokens[:, 6:8], cache=cache, index=torch.full((2, 1, 3), -1))
    with pytest.raises(ValueError, match=r"index: expected \[B,L,K\] with L = 1 chunks"):
        model(tokens[:, 6:8], cache=cache, index=torch.full((2, 2, 2), -1))
    refused(r"tokens: expected .* B=2", model, tokens[:1, 6:7], cache=cache)
    with pytest.raises(ValueError, match="cache: expected one of this model's configuration"):
        tiny.model(excluded_chunks=3)(tokens[:, :1], cache=cache)
    refused("capacity: expected at least the 6 tokens held; got 5", RPTCache.join, [cache], 5)
    index = SelfIndex()
    index.add(None, torch.zeros(2, 3))
    refused("search: expected an index with keys", index.search, torch.zeros(1, 3), 1, chunk=2, excluded_chunks=1)
