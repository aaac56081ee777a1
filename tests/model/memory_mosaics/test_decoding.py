"""Decoding with a cache: equal to the whole sequence, ragged prompts, evictions of a bounded memory."""

import numpy as np
import pytest
import torch

import retro_model
from retro_kernels.testing import relative_error, tolerances
from retro_model.memory_mosaics import MosaicsCache
from tests.model.memory_mosaics import tiny
from tests.refusals import refused

EXACT = tolerances.FLOOR[torch.float64]


def decoded(model, tokens, blocks, cache=None) -> torch.Tensor:
    """Return logits of tokens given in pieces."""
    cache = model.make_cache(len(tokens)) if cache is None else cache
    return torch.cat([model(piece, cache=cache) for piece in tokens.split(blocks, 1)], 1)


@pytest.mark.parametrize("blocks", [[1] * 19, [19], [1, 18], [7, 1, 1, 10]], ids=str)
@pytest.mark.parametrize("width", [48, 18])
def test_pieces_give_the_logits_of_the_whole(blocks, width):
    model, tokens = tiny.model(dtype=torch.float64, d_model=width), tiny.tokens()
    cache = model.make_cache(2)
    assert relative_error(decoded(model, tokens, blocks, cache), model(tokens)) < EXACT
    assert cache.pairs == 18 and cache.length == 19  # the last token's pair waits for the next


def test_decoding_goes_far_beyond_any_first_room():
    model, tokens = tiny.model(dtype=torch.float64, num_layers=1), tiny.tokens(B=1, N=300)
    cache = model.make_cache(1)
    assert relative_error(decoded(model, tokens, [2] + [1] * 298, cache), model(tokens)) < EXACT
    assert cache.contextual[0].keys.shape[1] <= 2 * cache.pairs + 1


def test_ragged_prompts_are_continued_as_if_alone():
    model = tiny.model(dtype=torch.float64)
    prompts = [[3], [1, 5, 2, 8, 8, 1], [4, 4], [9, 1, 5, 2, 8, 0]]
    together = retro_model.generate(model, prompts, 12)
    for prompt, got in zip(prompts, together):
        want = list(prompt)
        for _ in range(12):
            want.append(int(model(torch.tensor([want]))[0, -1].argmax()))
        assert got.tolist() == want
    assert len({tuple(t[-12:].tolist()) for t in together}) > 1


def forgetful_reads(model, tokens, capacity, evict):
    """Return one contextual layer's reads y [N,h,hd], one token at a time, with its memories as plain lists."""
    memory = model.blocks[0].context
    x = model.blocks[0].context_norm(model.embedding(tokens))
    average = memory.averages(x, None, None)
    key = (memory.key_scale[:, None] * average / average.norm(dim=-1, keepdim=True))[0].detach().numpy()
    value = memory.values(memory.heads_of(memory.value(x)))[0].detach().numpy()
    out = np.zeros(key.shape)
    for head in range(key.shape[1]):
        pairs: list[list] = []  # [key, value, reads]
        for t in range(len(key)):
            if t:
                pairs.append([key[t - 1, head], value[t - 1, head], None])
            if pairs:
                logits = np.array([key[t, head] @ k for k, _, _ in pairs])
                weights = np.exp(logits - logits.max())
                weights /= weights.sum()
                out[t, head] = sum(w * v for w, (_, v, _) in zip(weights, pairs))
                for pair, weight in zip(pairs, weights):
                    pair[2] = (1 if pair[2] is None else pair[2] * (1 - 1 / capacity)) + weight
            if len(pairs) > capacity:
                pairs.pop(0 if evict == "oldest" else int(np.argmin([reads for _, _, reads in pairs])))
    return torch.from_numpy(out)


@pytest.mark.parametrize("evict", ["oldest", "least_read"])
def test_a_bounded_memory_forgets_what_it_should(evict):
    model, tokens = tiny.model(dtype=torch.float64, num_layers=1), tiny.tokens(B=1, N=40)
    memory, seen = model.blocks[0].context, []
    memory.output.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    cache = model.make_cache(1, 6, evict=evict)
    decoded(model, tokens, 1, cache)
    got, want = torch.cat(seen, 1)[0].unflatten(-1, (3, 16)), forgetful_reads(model, tokens, 6, evict)
    assert relative_error(got, want) < EXACT
    assert relative_error(got, forgetful_reads(model, tokens, 40, evict)) > 1e-3  # it did forget
    assert cache.pairs == 6 and cache.contextual[0].keys.shape[1] <= 2 * 6 + 1


def test_reads_fade_in_half_types():
    """1 - 1/512 is 1 in bfloat16, so old pairs would not fade."""
    model = tiny.model(dtype=torch.bfloat16)
    cache = model.make_cache(1, 512, evict="least_read")
    decoded(model, tiny.tokens(B=1, N=40), 1, cache)
    state = cache.contextual[0]
    assert state.reads.dtype == torch.float32 and state.keys.dtype == torch.bfloat16
    want = tiny.model(dtype=torch.float64)
    exact = want.make_cache(1, 512, evict="least_read")
    decoded(want, tiny.tokens(B=1, N=40), 1, exact)
    total, expected = (s.reads[:, : s.end].sum(1) for s in (state, exact.contextual[0]))
    torch.testing.assert_close(total.double(), expected, rtol=1e-2, atol=0)
    assert float(expected.max()) < 39 + 39  # every pair began with 1 and every token read 1, times the decay


@pytest.mark.parametrize("blocks", [[40], [13, 1, 26]], ids=str)
def test_a_prompts_reads_fade_as_single_tokens_do(blocks):
    """The age of a token's reads does not depend on the call that read it."""
    model, tokens, reads = tiny.model(dtype=torch.float64), tiny.tokens(B=1, N=40), []
    for pieces in (blocks, [1] * 40):
        cache = model.make_cache(1, 64, evict="least_read")
        decoded(model, tokens, pieces, cache)
        reads.append(torch.stack([state.reads[:, state.first : state.end] for state in cache.contextual]))
    assert relative_error(*reads) < EXACT


@pytest.mark.parametrize("evict", ["oldest", "least_read"])
@pytest.mark.parametrize("capacity", [1, 4, 9])
def test_ragged_rows_forget_as_if_alone(evict, capacity):
    model, prompts = tiny.model(dtype=torch.float64), [[3], [1, 5, 2, 8, 8, 1, 4], [4, 4, 7]]
    model.limit_memory(capacity, evict)
    together = retro_model.generate(model, prompts, 10)
    assert [t.tolist() for t in together] == [retro_model.generate(model, [p], 10)[0].tolist() for p in prompts]
    more, caches = tiny.tokens(3, 5, seed=2), [model.make_cache(1) for _ in prompts]
    for prompt, cache in zip(prompts, caches):
        model(torch.tensor([prompt]), cache=cache)
    alone = [decoded(model, more[i : i + 1], 1, MosaicsCache.join([cache], 99)) for i, cache in enumerate(caches)]
    assert relative_error(decoded(model, more, 1, MosaicsCache.join(caches, 99)), torch.cat(alone)) < EXACT


def test_a_ragged_step_reads_its_mask_from_the_cache():
    """The mask of missing pairs is a growing table, dropped once every row has evicted those pairs."""
    model, caches = tiny.model(dtype=torch.float64), []
    for prompt in ([[3, 1]], [[1, 5, 2, 8, 8, 1, 4]]):
        caches.append(model.make_cache(1))
        model(torch.tensor(prompt), cache=caches[-1])
    cache = MosaicsCache.join(caches, 8)
    tables = []
    for token in tiny.tokens(B=2, N=7, seed=2).split(1, 1):
        state = cache.contextual[0]
        model(token, cache=cache)
        tables.append(None if state.present is None else state.present[:, state.first : state.end].sum(1).tolist())
    assert tables == [[2, 7], [3, 8], [4, 8], [5, 8], [6, 8], [7, 8], None]


def test_capacity_that_is_never_reached_changes_nothing():
    model, tokens = tiny.model(dtype=torch.float64), tiny.tokens()
    for evict in ("oldest", "least_read"):
        assert relative_error(decoded(model, tokens, 3, model.make_cache(2, 18, evict=evict)), model(tokens)) < EXACT


def test_a_limit_is_one_of_every_cache():
    model = tiny.model()
    model.limit_memory(5, "least_read")
    assert [model.make_cache(1, capacity).capacity for capacity in (100, 3)] == [5, 3]
    assert model.make_cache(1).evict == "least_read"
    model.limit_memory(None)
    assert model.make_cache(1).capacity is None
    refused("limit: expected an int >= 1; got 0", model.limit_memory, 0)


def test_a_step_costs_no_more_bytes_once_a_memory_is_full():
    model = tiny.model()
    cache = model.make_cache(1, 8)
    sizes = []
    for token in tiny.tokens(B=1, N=64).split(1, 1):
        model(token, cache=cache)
        sizes.append(cache.nbytes)
    assert len(set(sizes[20:])) == 1 and max(sizes) < 3 * sizes[8]


def test_a_cache_holds_no_prompt_but_its_pairs():
    """Every tensor owns its memory: a view of the last token would keep the whole prompt's."""
    model = tiny.model()
    cache = model.make_cache(2, 64)
    model(tiny.tokens(), cache=cache)
    for state in [*cache.contextual, *cache.persistent]:
        for name, tensor in vars(state).items():
            if isinstance(tensor, torch.Tensor):
                assert tensor.untyped_storage().nbytes() == tensor.nbytes, name


def test_caches_that_do_not_fit_are_named():
    model = tiny.model()
    empty, other = model.make_cache(1), model.make_cache(1, 4, evict="least_read")
    for bad in ([], [empty], [empty, other]):
        refused(r"caches: expected at least one, of one configuration.*; got", MosaicsCache.join, bad)
