"""A trained decoder gets a retriever: its logits do not change at first, and only the added weights learn."""

import copy

import pytest
import torch

from retro_kernels.testing import relative_error
from retro_model import generate
from retro_model.retrofit import RetrofittedRPT, retrofit_rpt
from retro_model.rpt import lambda_rank
from tests.model import decoders
from tests.model.rpt import tiny
from tests.refusals import refused

ADDED = {"cca_layers": (3, 4), "chunk_len": 4, "segment": 8, "excluded_chunks": 2, "num_heads": 2}


def decoder(kind):
    torch.manual_seed(0)
    if kind == "gpt2":
        return decoders.gpt2(tiny.VOCAB, 4, longest=128).eval()
    return decoders.llama(tiny.VOCAB, 4, d_ff=48, heads=4, kv_heads=2, longest=128).eval()


def learn(model, tokens):
    added = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.Adam(added, lr=1e-2), []
    targets = torch.zeros(2, 10, 10).masked_fill(torch.ones(10, 10).triu(-1).bool(), -torch.inf)
    targets[:, :, 1] = 0.7
    for _ in range(12):
        logits, retrieved = model(tokens, return_retrieved=True)
        total, pairs = lambda_rank(retrieved.scores, targets, 1.0)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) + total / pairs
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_another_librarys_decoder(kind):
    plain = decoder(kind)
    tokens = tiny.tokens(43)
    want = plain(tokens).logits.detach()
    frozen = copy.deepcopy(plain.state_dict())
    model = retrofit_rpt(plain, **ADDED).train()
    assert isinstance(model, RetrofittedRPT)
    assert torch.equal(model(tokens, retrieval=False), want) and relative_error(model(tokens), want) < 1e-6
    losses = learn(model, tokens)
    assert losses[-1] < losses[0]
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), frozen.values()))
    moved = model(tokens)
    assert torch.equal(model(tokens, retrieval=False), want) and relative_error(moved, want) > 1e-4
    for n in (3, 9, 24):  # still causal
        assert relative_error(model(tokens[:, :n]), moved[:, :n]) < 1e-5
    index = torch.full((2, 10, 2), -1)
    assert relative_error(model(tokens, index=index), want) < 1e-6
    again = retrofit_rpt(decoder(kind), **ADDED)
    again.load_state_dict(model.added_state_dict(), strict=False)
    assert torch.equal(again(tokens), moved)
    assert torch.equal(copy.deepcopy(model)(tokens), moved)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("changes", [{}, {"null_slot": True}, {"num_neighbours": 1, "excluded_chunks": 1}], ids=str)
def test_decoding_equals_the_whole(kind, changes):
    tokens = tiny.tokens(43)
    model = retrofit_rpt(decoder(kind).double(), **ADDED | changes).eval()
    torch.manual_seed(1)
    for cca in model.cca.values():
        torch.nn.init.normal_(cca.output.weight, std=0.3)
    with torch.no_grad():
        want, whole = model(tokens, return_retrieved=True)
        assert relative_error(model(tokens, retrieval=False), want) > 1e-3
        for blocks in ([1] * 43, [9, 1, 7, *[1] * 10, 16], [43], [3, 40]):
            cache, outs, indexes, first = model.make_cache(2, 43), [], [], 0
            for count in blocks:
                out, retrieved = model(tokens[:, first : first + count], cache=cache, return_retrieved=True)
                outs.append(out)
                indexes += [] if retrieved is None else [retrieved.index]
                first += count
            assert relative_error(torch.cat(outs, 1), want) < 1e-12
            assert torch.equal(torch.cat(indexes, 1), whole.index)
        assert (whole.index >= 0).any()
        cache = model.make_cache(2)
        index = torch.full((2, 5, model.config.num_neighbours), -1)
        index[:, 3:] = 0
        got = torch.cat([model(tokens[:, :20], cache=cache, index=index), model(tokens[:, 20:21], cache=cache)], 1)
        assert relative_error(got, model(tokens[:, :21], index=index)) < 1e-12


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_generates(kind):
    model = retrofit_rpt(decoder(kind).double(), **ADDED).eval()
    torch.manual_seed(1)
    for cca in model.cca.values():
        torch.nn.init.normal_(cca.output.weight, std=0.3)
    prompts = [tiny.tokens(21)[0], tiny.tokens(13)[1], tiny.tokens(13)[0]]
    for options in ({}, {"retrieval": False}):
        got = generate(model, prompts, max_new_tokens=9, temperature=0.0, **options)
        for prompt, text in zip(prompts, got):
            want = prompt[None]
            for _ in range(9):
                want = torch.cat([want, model(want, **options)[:, -1:].argmax(-1)], 1)
            assert torch.equal(text, want[0])


def test_our_own_decoder():
    plain = tiny.model(cca_layers=(), retriever=False, dtype=torch.float32)
    tokens = tiny.tokens(43)
    want = plain(tokens)
    model = retrofit_rpt(plain, cca_layers=(3, 4), excluded_chunks=2).train()
    assert torch.equal(model(tokens), want)
    losses = learn(model, tokens)
    assert losses[-1] < losses[0] and torch.equal(plain(tokens), want) and not torch.equal(model(tokens), want)
    cache = model.eval().make_cache(2)
    got = torch.cat([model(tokens[:, :20], cache=cache), model(tokens[:, 20:], cache=cache)], 1)
    assert relative_error(got, model(tokens)) < 1e-5


def test_refuses():
    refused("vocab_size: expected the decoder's 31; got 7", retrofit_rpt, decoder("gpt2"), vocab_size=7)
    refused("decoder: expected an RPT without neighbours", retrofit_rpt, tiny.model())
    refused("cca_layers: expected at least one layer", retrofit_rpt, decoder("gpt2"), cca_layers=())
    refused("decoder: expected", retrofit_rpt, torch.nn.Linear(3, 3), error=TypeError)
    model, tokens = retrofit_rpt(decoder("llama"), **ADDED), tiny.tokens(9)
    refused("past_key_values: not supported", model, tokens, past_key_values=decoders.transformers.DynamicCache())
    refused(r"^cache: expected .*; got a DynamicCache", model, tokens, cache=decoders.transformers.DynamicCache())
