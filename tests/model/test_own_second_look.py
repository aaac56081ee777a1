"""A second look at each chunk, with its own neighbours, against the same passes token by token (`joint.py`)."""

import pytest
import torch

from retro_model.retrofit import retrofit
from tests.model.test_own_attention import M, batch, joint_logits, own
from tests.model.test_own_copying import copier

pytest.importorskip("transformers")

PREFIX = (1, 17, 4, 33, 9)
KINDS = ("Llama", "Mistral window", "Gemma3", "SmolLM3", "Qwen3Moe", "StableLm", "GPT2", "GPTNeoX", "Gemma2 eager")


@pytest.mark.parametrize("prefix", [None, PREFIX], ids=["", "prefix"])
@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_equals_both_looks_token_by_token(name, prefix):
    before, model = own(name, prefix=prefix or (), second_look=True)
    given = batch()
    got = model(*given[:2], neighbour_mask=given[2])
    want = joint_logits(before, model, *given, prefix=prefix and torch.tensor(prefix))
    close = 1e-5 if "eager" in name else 1e-12
    torch.testing.assert_close(got, want, rtol=0, atol=close)
    _, once = own(name, prefix=prefix or ())
    assert (got - once(*given[:2], neighbour_mask=given[2])).abs().max() > 0.1


@torch.no_grad()
def test_some_layers():
    (before, model), given = own("Llama", second_look=True, cca_layers=(2,)), batch()
    got = model(*given[:2], neighbour_mask=given[2])
    torch.testing.assert_close(got, joint_logits(before, model, *given), rtol=0, atol=1e-12)


@torch.no_grad()
def test_without_neighbours_the_outputs_are_the_decoders_to_the_bit():
    before, model = own("Llama", second_look=True)
    tokens = batch()[0]
    assert torch.equal(model(tokens), before(tokens).logits)
    assert torch.equal(model(tokens[:, : M - 1], batch()[1]), before(tokens[:, : M - 1]).logits)


@torch.no_grad()
def test_padding_behind_and_some_logits():
    _, model = own("Llama", second_look=True, prefix=PREFIX)
    tokens, neighbours, mask = batch()
    pad = torch.ones_like(tokens)
    pad[1, -3:] = 0
    whole = model(tokens, neighbours, neighbour_mask=mask)
    padded = model(tokens, neighbours, neighbour_mask=mask, attention_mask=pad)
    torch.testing.assert_close(padded[:, :-3], whole[:, :-3], rtol=0, atol=1e-12)
    some = model(tokens, neighbours, neighbour_mask=mask, logits_to_keep=5)
    torch.testing.assert_close(some, whole[:, -5:], rtol=0, atol=1e-12)


@torch.no_grad()
def test_tokens_are_copied_by_the_first_looks():
    _, plain, model = copier("Llama", second_look=True)
    tokens, neighbours, mask = batch()
    got, off = (m(tokens, neighbours, neighbour_mask=mask) for m in (model, plain))
    assert torch.equal(got[:, : M - 1], off[:, : M - 1]) and (got - off).abs().max() > 0.1
    hidden = []
    with plain.decoder.get_output_embeddings().register_forward_pre_hook(lambda _, args: hidden.append(args[0])):
        plain(tokens, neighbours, neighbour_mask=mask)
    attending = model._attending(tokens, (neighbours, mask), None, None, None)
    torch.testing.assert_close(got, model.copying(off, hidden[0], attending.copied), rtol=0, atol=1e-12)


def test_the_loss_trains_bias_and_scale_with_and_without_checkpointing():
    _, model = own("Llama", second_look=True, prefix=PREFIX)
    tokens, neighbours, mask = batch()
    logits = model(tokens, neighbours, neighbour_mask=mask)[:, :-1]
    want, grads = torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none"), []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train().zero_grad()
        counted = torch.ones_like(tokens, dtype=torch.bool)
        loss, losses = model(tokens, neighbours, neighbour_mask=mask, loss_mask=counted)
        torch.testing.assert_close(losses, want.detach(), rtol=0, atol=1e-12)
        loss.backward()
        grads.append([p.grad.clone() for p in (model.bias, model.scale)])
    want = torch.autograd.grad(want.sum(), (model.bias, model.scale))
    for got in grads:
        torch.testing.assert_close(got, list(want), rtol=0, atol=1e-11)


@torch.no_grad()
def test_caches_and_padding_in_front_are_refused():
    _, model = own("Llama", second_look=True)
    tokens, neighbours, mask = batch()
    pad = torch.ones_like(tokens)
    pad[1, :3] = 0
    for options in ({"attention_mask": pad}, {"cache": model.make_cache(2)}):
        with pytest.raises(ValueError, match="second_look: expected whole texts"):
            model(tokens, neighbours, neighbour_mask=mask, **options)
    assert retrofit(model.decoder, **model.config.to_dict()).config.second_look
