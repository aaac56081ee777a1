"""Retrofit with transformers and PEFT: supported decoders, padding, checkpointing, adapters."""

import pytest
import torch

from retro_kernels.testing import assert_passes
from retro_model.retrofit import retrofit
from tests.model import decoders
from tests.model.test_retrofit import ADDED, LAYERS, M, N, V, batch, gpt2, llama, retrofitted

transformers = pytest.importorskip("transformers")

SIZES = dict(vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=2)
FIT = {
    "Mistral": dict(num_key_value_heads=1),
    "Qwen3": dict(num_key_value_heads=1, head_dim=16),
    "Mixtral": dict(num_key_value_heads=1, num_local_experts=2),
}
UNFIT = {
    "Gemma2": dict(num_key_value_heads=1, head_dim=16),
    "Olmo2": dict(num_key_value_heads=1),
    "Phi": {},
    "GPTJ": dict(n_embd=32, n_layer=LAYERS, n_head=2, rotary_dim=8),
}


def make(name: str, changes: dict):
    torch.manual_seed(0)
    sizes = changes | {"vocab_size": V} if name == "GPTJ" else SIZES | changes
    config = getattr(transformers, f"{name}Config")(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize("name", FIT)
def test_blocks_that_add_and_go_on_from_the_sum_fit(name):
    decoder = make(name, FIT[name])
    tokens, neighbours, mask = batch()
    with torch.no_grad():
        want = decoder(tokens).logits
        model = retrofit(decoder, **ADDED).eval()
        assert torch.equal(model(tokens, neighbours, neighbour_mask=mask), want)  # starts without effect


@pytest.mark.parametrize("name", UNFIT)
def test_other_blocks_are_refused_by_name(name):
    with pytest.raises(
        ValueError,
        match=rf"decoder: expected blocks that add their attention's output.*; got {name}\w*, whose output differs",
    ):
        retrofit(make(name, UNFIT[name]), **ADDED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_tell_the_blocks_apart_too(dtype):
    retrofit(make("Mistral", FIT["Mistral"]).to(dtype), **ADDED)
    with pytest.raises(ValueError, match="got PhiDecoderLayer"):
        retrofit(make("Phi", {}).to(dtype), **ADDED)


def test_heads_that_the_kernels_do_not_take():
    """Heads of 100: the cross-attention has its own width."""
    changes = {"hidden_size": 200, "num_key_value_heads": 1}
    with pytest.raises(ValueError, match="head_dim: expected a multiple of 8 from 16 to 256; got 100"):
        retrofit(make("Llama", changes), **ADDED)
    assert retrofit(make("Llama", changes), **ADDED, head_dim=16).cca["2"].head_dim == 16


@pytest.mark.parametrize("decoder", [gpt2, llama])
def test_padding_on_the_left(decoder):
    _, model = retrofitted(decoder, effect=True)
    model.double().eval()
    close = lambda got, want: assert_passes("logits", got, want, None, torch.float64)  # noqa: E731
    decoders.assert_padding_on_the_left_changes_nothing(model, M, *batch(), close)


def gradients(model, *batches):
    model.zero_grad()
    sum(model(t, n, neighbour_mask=k).square().mean() for t, n, k in batches).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("decoder", [gpt2, llama])
def test_checkpointing_changes_no_gradient(decoder):
    """Two passes before one backward pass: each recomputed block uses the neighbours of its own pass."""
    _, model = retrofitted(decoder, effect=True)
    model.double().train()
    batches = [batch(0), batch(1, K=1)]
    want = gradients(model, *batches)
    computed = []
    blocks = model.decoder.transformer.h if decoder is gpt2 else model.decoder.model.layers
    model.encoder.register_forward_hook(lambda *_: computed.append(1))
    model.gradient_checkpointing_enable()
    assert model.train() is model and not any(
        m.training for m in blocks[0].modules() if isinstance(m, torch.nn.Dropout)
    )
    got = gradients(model, *batches)
    assert len(computed) == 4  # once in each pass, again in each backward pass
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="use_reentrant: expected False"):
        model.gradient_checkpointing_enable({"use_reentrant": True})
    model.gradient_checkpointing_disable()
    gradients(model, *batches)
    assert len(computed) == 6


def lora(decoder, **changes):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(
        decoder, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **changes)
    )


@pytest.mark.parametrize("inner", [False, True])
def test_adapters_and_cross_attention_train_together(inner):
    """retrofit(peft) and retrofit(wrapped model): LoRA, CCA and encoder learn, the decoder's own weights stay."""
    torch.manual_seed(0)
    peft_model = lora(llama())
    model = retrofit(peft_model.get_base_model() if inner else peft_model, **ADDED, cca_output="fresh").train()
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in trains if name.startswith("decoder.")} == {
        n for n, _ in model.named_parameters() if "lora_" in n
    }
    assert all(name in trains for name, _ in model.named_parameters() if not name.startswith("decoder."))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    tokens, neighbours, mask = batch()
    losses = []
    for _ in range(8):
        logits = model(tokens, neighbours, neighbour_mask=mask)
        losses.append(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.1
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == trains


def test_adapters_around_a_retrofit_are_refused_when_they_would_train_alone():
    model = lora(retrofit(llama(), **ADDED)).train()
    with pytest.raises(RuntimeError, match=r"put PEFT into the decoder first, retrofit\(get_peft_model"):
        model(*batch()[:2])
    with torch.no_grad():
        model(*batch()[:2])


def test_lora_dropout_follows_the_mode_and_the_decoders_own_does_not():
    model = retrofit(lora(llama(), lora_dropout=0.5), **ADDED)
    tokens = batch()[0]
    assert torch.equal(model.eval()(tokens), model(tokens))
    assert not torch.equal(model.train()(tokens), model(tokens))


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("bias", [False, True])
def test_the_loss_without_all_logits(make, bias):
    """Values and gradients of the plain cross-entropy; the readout computes one column, unless it is no
    plain matrix.
    """
    before, model = retrofitted(make, effect=True)
    if bias:
        before.lm_head = torch.nn.Linear(32, V)
        model = retrofit(before, **ADDED, cca_output="fresh")
    model.double().train()
    tokens, neighbours, mask = batch()
    counted = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(1)) > 0.3
    columns = []
    model.decoder.lm_head.register_forward_hook(lambda *call: columns.append(call[-1].shape[1]))
    for targets in (None, tokens.flip(1)):
        got = model(tokens, neighbours, neighbour_mask=mask, loss_mask=counted, targets=targets)
        got.total.backward()
        assert columns.pop() == (N if bias else 1)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        logits = model(tokens, neighbours, neighbour_mask=mask)
        aims = (tokens if targets is None else targets)[:, 1:]
        want = (
            torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), aims, reduction="none") * counted[:, 1:]
        )
        want.sum().backward()
        torch.testing.assert_close(got.losses, want.detach(), rtol=1e-10, atol=1e-12)
        for name, p in model.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(gradients.pop(name), p.grad, rtol=1e-9, atol=1e-11)
        assert not gradients
        model.zero_grad()
        columns.clear()
