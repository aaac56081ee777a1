"""Copying from neighbours, against a mixture that is summed entry by entry in float64."""

import math

import pytest
import torch

from retro_model.generation import generate
from retro_model.retrofit import retrofit
from retro_model.retrofit.own_copy import Copying
from tests.model import toys
from tests.model.test_own_attention import K, M, N, R, V, batch, own

pytest.importorskip("transformers")

PREFIX = (1, 17, 4, 33, 9)
NUMBERS = (-1.0, 3.0, -1.0)
KINDS = ("Llama", "GPT2", "Granite", "Gemma2 eager", "Nemotron")


def copier(name: str, **changes):
    """Return the original decoder, a model that attends neighbours, and the same model that copies too."""
    before, plain = own(name, **changes)
    model = retrofit(plain.decoder, **plain.config.to_dict() | {"copying": True}).eval()
    model.load_state_dict(plain.added_state_dict(), strict=False)
    with torch.no_grad():
        model.copying.numbers.copy_(torch.tensor(NUMBERS))
        model.copying.centre.normal_(generator=torch.Generator().manual_seed(3))
    return before, plain, model


def last_states(decoder, call) -> torch.Tensor:
    """Return the decoder's last states in a call."""
    base, kept = decoder.base_model, []
    with base.register_forward_hook(lambda *given: kept.append(given[-1][0])):
        call()
    return kept[0]


def mixture(before, plain, model, tokens, neighbours, mask) -> torch.Tensor:
    """Return log-probabilities [B,N,V], one token and one entry after the other."""
    logits = plain(tokens, neighbours, neighbour_mask=mask)
    hidden = last_states(plain.decoder, lambda: plain(tokens, neighbours, neighbour_mask=mask))
    log_tau, alpha, gamma = model.copying.numbers.tolist()
    lead = torch.tensor(model.config.prefix or (model.config.sink_token,))
    out = torch.log_softmax(logits, -1)
    cos = torch.nn.CosineSimilarity(0)
    for b, row in enumerate(tokens):
        entries = []
        for p in range(len(row)):
            if (p + 1) % M == 0:  # the neighbours of this chunk are attended from here on
                chunk = (p + 1) // M - 1
                for near, real in zip(neighbours[b, chunk], mask[b, chunk]):
                    read = last_states(before, lambda near=near: before(torch.cat([lead, near])[None]))[0, len(lead) :]
                    entries += [(read[j], near[j + 1]) for j in range(R - 1) if real[j] and real[j + 1]]
            if not entries:
                continue
            centre = model.copying.centre
            c = torch.stack([cos(hidden[b, p] - centre, state - centre) for state, _ in entries])
            share = torch.softmax(c / math.exp(log_tau), 0)
            mixed = 1 / (1 + math.exp(-(gamma + alpha * float(c.max()))))
            copied = torch.zeros(V, dtype=torch.float64)
            for weight, (_, token) in zip(share, entries):
                copied[token] += weight
            out[b, p] = torch.log((1 - mixed) * out[b, p].exp() + mixed * copied)
    return out


@pytest.mark.parametrize("prefix", [(), PREFIX], ids=["", "prefix"])
@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_equals_the_mixture_of_every_entry(name, prefix):
    before, plain, model = copier(name, prefix=prefix)
    given = batch()
    got = torch.log_softmax(model(*given[:2], neighbour_mask=given[2]), -1)
    close = 1e-5 if "eager" in name else 1e-10
    torch.testing.assert_close(got, mixture(before, plain, model, *given), rtol=0, atol=close)
    assert (got - torch.log_softmax(plain(*given[:2], neighbour_mask=given[2]), -1)).abs().max() > 0.1


@torch.no_grad()
def test_other_logits_are_the_models_own_to_the_bit():
    before, plain, model = copier("Llama")
    tokens, neighbours, mask = batch()
    assert torch.equal(model(tokens), before(tokens).logits)
    neighbours = neighbours % 20
    got, want = (m(tokens, neighbours, neighbour_mask=mask) for m in (model, plain))
    assert torch.equal(got[:, : M - 1], want[:, : M - 1]) and torch.equal(got[..., 20:], want[..., 20:])
    assert (got[:, M:, :20] > want[:, M:, :20]).any()
    none = torch.zeros_like(mask)
    assert torch.equal(model(tokens, neighbours, neighbour_mask=none), before(tokens).logits)


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
@torch.no_grad()
def test_a_cache_keeps_what_was_read(name):
    model, (tokens, neighbours, mask) = copier(name)[2], batch()
    given = {"neighbours": neighbours, "neighbour_mask": mask}
    got = toys.in_blocks(model, model.make_cache(len(tokens)), tokens, [6, 1, 1, 5, N - 13], given=given)
    torch.testing.assert_close(got, model(tokens, **given), rtol=0, atol=1e-11)


@torch.no_grad()
def test_padded_rows_equal_rows_alone_and_some_logits_equal_all():
    model = copier("Llama")[2]
    tokens, neighbours, mask = batch()
    pad = torch.ones_like(tokens)
    pad[1, :3] = 0
    got = model(tokens, neighbours, neighbour_mask=mask, attention_mask=pad)
    count = (N - 3) // M
    alone = model(tokens[1:, 3:], neighbours[1:, :count], neighbour_mask=mask[1:, :count])
    torch.testing.assert_close(got[1:, 3:], alone, rtol=0, atol=1e-12)
    some = model(tokens, neighbours, neighbour_mask=mask, attention_mask=pad, logits_to_keep=5)
    torch.testing.assert_close(some, got[:, -5:], rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="logits_to_keep: expected a number"):
        model(tokens, neighbours, logits_to_keep=torch.arange(3))


def test_the_loss_is_the_mixtures_and_trains_its_numbers():
    model = copier("Llama", prefix=PREFIX)[2].train()
    tokens, neighbours, mask = batch()
    counted = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(2)) > 0.3
    total, losses = model(tokens, neighbours, neighbour_mask=mask, loss_mask=counted)
    logits = model(tokens, neighbours, neighbour_mask=mask)[:, :-1]
    want = torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none") * counted[:, 1:]
    torch.testing.assert_close(losses, want.detach(), rtol=0, atol=1e-12)
    total.backward()
    for p in model.parameters():
        assert not p.requires_grad or (p.grad != 0).any()
    moved, by = model.copying.numbers, torch.tensor([0.0, 0.0, 1e-6], dtype=torch.float64)
    with torch.no_grad():
        moved += by
        above = model(tokens, neighbours, neighbour_mask=mask, loss_mask=counted).total
    assert float((above - total).detach() / 1e-6) == pytest.approx(float(moved.grad[2]), rel=1e-4)


@torch.no_grad()
def test_kept_neighbours_have_their_last_states():
    _, plain, model = copier("Llama")
    tokens, neighbours, mask = batch()
    assert model.neighbour_bytes() == plain.neighbour_bytes() + 8 * R * 64
    for of in (plain, model):
        want = of(tokens, neighbours, neighbour_mask=mask)
        with of.keeping() as kept:
            for _ in range(2):
                assert torch.equal(of(tokens, neighbours, neighbour_mask=mask), want)
        assert kept.read == kept.found == len(kept) and kept.bytes == len(kept) * of.neighbour_bytes()


@torch.no_grad()
def test_generation_and_a_saved_model_copy(tmp_path):
    from retro_model.integrations.huggingface import RetrofitForCausalLM

    def retrieve(chunks):  # [n,M] -> [n,K,R]
        return (chunks[:, :1, None] * torch.arange(1, K + 1)[:, None] + torch.arange(R)) % V, None

    whole = RetrofitForCausalLM.from_decoder(
        own("Llama")[1].decoder, neighbours="own", chunk_len=M, copying=True
    ).eval()
    whole.model.copying.numbers.copy_(torch.tensor((-3.0, 8.0, 2.0)))  # copies nearly always
    whole.model.copying.centre.fill_(0.1)
    text = prompt = batch()[0][:1, :6]
    got = generate(whole.model, prompt, max_new_tokens=7, retrieve=retrieve)
    for _ in range(7):
        chunks = text[:, : text.shape[1] // M * M].view(-1, M)
        text = torch.cat([text, whole.model(text, retrieve(chunks)[0][None])[:, -1:].argmax(-1)], 1)
    assert torch.equal(got[0], text[0])
    theirs = whole.generate(prompt, max_new_tokens=7, do_sample=False, retrieve=retrieve, eos_token_id=None)
    assert torch.equal(theirs[0], text[0])
    whole.save_pretrained(tmp_path / "model")
    again = RetrofitForCausalLM.from_pretrained(tmp_path / "model").eval()
    tokens, neighbours, mask = batch()
    assert torch.equal(again.model.copying.centre, whole.model.copying.centre)
    want, loaded = (m.model(tokens, neighbours, neighbour_mask=mask) for m in (whole, again))
    torch.testing.assert_close(loaded, want, rtol=0, atol=1e-5)


def test_a_fit_copies_what_repeats_and_nothing_else():
    g = torch.Generator().manual_seed(0)
    c = torch.rand(600, 20, generator=g) * 0.5
    chance = torch.rand(600, 20, generator=g) < 0.05
    nats, found = torch.full((600,), 3.0), torch.rand(600, generator=g) < 0.3
    c[found, 0], repeats = 0.9, chance.clone()
    repeats[found, 0] = True
    copying = Copying(8)
    gain = copying.fit(nats, c, repeats)
    assert 0.6 < gain < 0.3 * 3  # a sure copy saves three nats
    assert Copying(8).fit(torch.full((600,), 1.0), c, chance) < 0.005
