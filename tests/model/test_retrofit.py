"""Retrieval added to frozen decoders, ours and the Hugging Face library's: unchanged logits, trained weights,
causality.
"""

import copy
import pickle

import pytest
import torch

from retro_kernels.testing import assert_passes
from retro_model.generation import generate
from retro_model.layers import ChunkedCrossAttention
from retro_model.retro import Retro
from retro_model.retro.config import RetroConfig
from retro_model.retrofit import retrofit
from retro_model.retrofit.new import RetrofittedDecoder
from tests.fresh import python
from tests.model import decoders
from tests.refusals import refused

transformers = pytest.importorskip("transformers")

V, M, R, K, N, LAYERS = 50, 8, 16, 2, 29, 3
ADDED = dict(
    cca_layers=(2, 3),
    chunk_len=M,
    encoder_d_model=32,
    encoder_d_ff=64,
    encoder_heads=2,
    encoder_head_dim=16,
    encoder_layers=1,
)


def gpt2():
    return decoders.gpt2(V, LAYERS)


def llama():
    return decoders.llama(V, LAYERS, longest=2048)


def ours():
    config = RetroConfig(V, 32, 64, 2, 16, LAYERS, chunk_len=M, neighbour_len=R, cca_layers=(), encoder_d_model=32)
    return Retro(config)


DECODERS = [gpt2, llama, ours]


def logits(model, *args, **kwargs):
    out = model(*args, **kwargs)
    return getattr(out, "logits", out)


def batch(seed: int = 0, K: int = K):
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(2, N // M, K, R, generator=g) > 0.2
    return torch.randint(V, (2, N), generator=g), torch.randint(V, (2, N // M, K, R), generator=g), mask


def retrieve(chunks):
    """Return neighbours that depend on the chunk."""
    return (chunks.repeat(1, R // M)[:, None] + torch.arange(K)[:, None]) % V, None


def retrofitted(make, effect: bool = False):
    """Return the original decoder, and one with retrieval; with `effect` as if trained."""
    torch.manual_seed(0)
    decoder = make().eval()
    before = copy.deepcopy(decoder)
    model = retrofit(decoder, **ADDED)
    if effect:
        for p in model.parameters():
            if p.requires_grad and p.dim() > 1:
                torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return before, model


@pytest.mark.parametrize("make", DECODERS)
def test_with_retrieval_off_the_outputs_are_the_originals_to_the_bit(make):
    before, model = retrofitted(make, effect=True)
    tokens, neighbours, mask = batch()
    for mode in (model.eval(), model.train()):
        assert torch.equal(mode(tokens), logits(before, tokens))
    on = model.eval()(tokens, neighbours, neighbour_mask=mask)
    assert not torch.allclose(on[:, M - 1 :], model(tokens)[:, M - 1 :])
    assert torch.equal(model(tokens), logits(before, tokens))  # a pass with retrieval changes no state


@pytest.mark.parametrize("make", DECODERS)
def test_what_is_added_starts_without_effect(make):
    before, model = retrofitted(make)
    tokens, neighbours, mask = batch()
    assert torch.equal(model(tokens, neighbours, neighbour_mask=mask), logits(before, tokens))


@pytest.mark.parametrize("make", DECODERS)
def test_what_is_added_may_start_at_random_as_in_the_paper(make):
    torch.manual_seed(0)
    decoder = make().eval()
    tokens, neighbours, mask = batch()
    model = retrofit(decoder, **ADDED, cca_output="fresh").eval()
    moved = (model(tokens, neighbours, neighbour_mask=mask) - model(tokens)).abs().amax(-1)
    assert (moved[:, : M - 1] == 0).all() and (moved[:, M - 1 :] > 0).any()
    outputs = [m.output.weight for m in model.modules() if isinstance(m, ChunkedCrossAttention)]
    depth = 2 * LAYERS + 2  # residual updates: the initial scale of a Retro's own
    assert all(abs(w.std().item() * (w.shape[1] * depth) ** 0.5 - 1) < 0.1 for w in outputs) and len(outputs) == 2
    refused("cca_output: expected 'zero' or 'fresh'; got 'ones'", retrofit, make(), **ADDED, cca_output="ones")


@pytest.mark.parametrize("make", DECODERS)
def test_only_new_weights_train_and_all_of_them(make):
    before, model = retrofitted(make, effect=True)
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert sum(p.numel() for p in frozen.values()) == sum(p.numel() for p in before.parameters())
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    tokens, neighbours, mask = batch()
    model.train()(tokens, neighbours, neighbour_mask=mask).logsumexp(-1).sum().backward()
    assert all(p.grad is None for p in frozen.values())
    assert not [name for name, p in trained.items() if p.grad is None or not p.grad.any()]
    optimizer.step()
    assert all(torch.equal(p, values[name]) for name, p in frozen.items())
    assert not [name for name, p in trained.items() if torch.equal(p, values[name])]
    assert torch.equal(model.eval()(tokens), logits(before, tokens))


@pytest.mark.parametrize("make", DECODERS)
def test_a_copy_and_a_pickled_model_retrieve_by_themselves(make):
    _, model = retrofitted(make, effect=True)
    tokens, neighbours, mask = batch()
    on = model.eval()(tokens, neighbours, neighbour_mask=mask)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(tokens, neighbours, neighbour_mask=mask), on)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        assert not other(tokens, neighbours, neighbour_mask=mask).any()  # it shares nothing with the first model
    assert torch.equal(model(tokens, neighbours, neighbour_mask=mask), on)


@pytest.mark.parametrize("make", DECODERS)
def test_what_the_decoder_fixes_cannot_be_changed(make):
    sizes = {"vocab_size": V + 1, "d_model": 64, "d_ff": 96, "num_layers": LAYERS + 1}
    for name, value in sizes.items():
        refused(f"{name}: expected the decoder's .*; got {value}", retrofit, make(), **ADDED | {name: value})
    if make is ours:
        refused("num_heads: expected the decoder's 2; got 4", retrofit, make(), **ADDED | {"num_heads": 4})
        assert retrofit(make(), **ADDED, share_embeddings=True, num_layers=LAYERS).config.share_embeddings
    else:
        assert retrofit(make(), **ADDED | {"num_heads": 1, "head_dim": 24}).cca["2"].head_dim == 24
        refused("share_embeddings: expected False", retrofit, make(), **ADDED, share_embeddings=True)


@pytest.mark.parametrize("make", DECODERS)
def test_a_neighbour_is_seen_from_the_last_token_of_its_chunk_on(make):
    _, model = retrofitted(make, effect=True)
    tokens, neighbours, mask = batch()
    before = model.eval()(tokens, neighbours, neighbour_mask=mask)
    for chunk in range(N // M):
        other = neighbours.clone()
        other[:, chunk] = (other[:, chunk] + 1) % V
        changed = (model(tokens, other, neighbour_mask=mask) != before).any(-1).any(0)
        assert changed.nonzero()[0].item() == (chunk + 1) * M - 1


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_block_by_hand(make):
    """The hooks equal the written sums: H = x + attention, CCA on its norm, then the block's feed-forward."""
    _, model = retrofitted(make, effect=True)
    tokens, neighbours, mask = batch()
    blocks, name = (model.decoder.transformer.h, "attn") if make is gpt2 else (model.decoder.model.layers, "self_attn")
    after = blocks[1].ln_2 if make is gpt2 else blocks[1].post_attention_layernorm
    kept = {}
    first = lambda out: out[0] if isinstance(out, tuple) else out  # noqa: E731
    blocks[1].register_forward_pre_hook(
        lambda m, a, k: kept.update(x=a[0] if a else k["hidden_states"]), with_kwargs=True
    )
    getattr(blocks[1], name).register_forward_hook(lambda m, a, out: kept.update(own=first(out)), prepend=True)
    after.register_forward_pre_hook(lambda m, a: kept.update(residual=a[0]))
    model.eval()(tokens, neighbours, neighbour_mask=mask)
    hidden = kept["x"] + kept["own"]
    chunks = hidden[:, : N // M * M].unflatten(1, (N // M, M))
    encoded = model.encoder(neighbours, chunks, neighbour_mask=mask)
    update = model.cca["2"](model.cca_norm["2"](hidden), encoded, neighbour_mask=mask)
    assert update.abs().max() > 0.1
    assert torch.equal(kept["residual"], kept["x"] + (kept["own"] + update))


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize(
    "steps", [[1] * N, [M - 1, 1, 3, 2 * M, N - 3 * M - 3], [N - 1, 1]], ids=["tokens", "blocks", "prompt"]
)
def test_decoding_with_a_cache_equals_the_whole(make, steps):
    _, model = retrofitted(make, effect=True)
    model.double()
    tokens, neighbours, mask = batch()
    mask[0, 1] = False
    want = model.eval()(tokens, neighbours, neighbour_mask=mask)
    assert_passes("logits", decoders.in_steps(model, steps, tokens, neighbours, mask), want, None, torch.float64)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_chunks_that_complete_without_neighbours_have_none(make):
    _, model = retrofitted(make, effect=True)
    model.double()
    tokens, neighbours, mask = batch()
    mask[:, 1:] = False
    want = model.eval()(tokens, neighbours, neighbour_mask=mask)
    cache = model.make_cache(2)
    first = model(tokens[:, : M + 2], neighbours[:, :1], neighbour_mask=mask[:, :1], cache=cache)
    rest = [model(tokens[:, i : i + 1], cache=cache) for i in range(M + 2, N)]
    assert_passes("logits", torch.cat([first, *rest], 1), want, None, torch.float64)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_generation_is_greedy_continuation_of_the_whole(make):
    """Token by token against the uncached model; prompts of different lengths, neighbours that depend on the chunk. The
    decoder is called as often as for the longest.
    """
    _, model = retrofitted(make, effect=True)
    model.double().eval()
    prompts, calls = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9], list(range(M)), list(range(2 * M + 1))], []
    model.decoder.register_forward_hook(lambda *_: calls.append(1))
    texts = generate(model, prompts, 2 * M + 3, retrieve=retrieve)
    assert [len(text) for text in texts] == [len(prompt) + 2 * M + 3 for prompt in prompts]
    assert len(calls) == 2 * M + 3
    decoders.assert_greedy(model, retrieve, prompts, texts, M)
    assert [t.tolist() for t in generate(model, prompts, 2 * M + 3)] != [t.tolist() for t in texts]


def test_added_weights_travel_alone():
    _, model = retrofitted(gpt2, effect=True)
    torch.manual_seed(0)
    other = retrofit(gpt2().eval(), **ADDED)
    state = model.added_state_dict()
    assert state and not any(name.startswith("decoder.") for name in state)
    keys = other.load_state_dict(state, strict=False)
    assert not keys.unexpected_keys and all(name.startswith("decoder.") for name in keys.missing_keys)
    tokens, neighbours, mask = batch()
    assert torch.equal(
        other.eval()(tokens, neighbours, neighbour_mask=mask), model.eval()(tokens, neighbours, neighbour_mask=mask)
    )


def test_another_decoder_by_its_blocks():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = torch.nn.Linear(32, 32)

        def forward(self, x):
            return x + self.mix(x)

    class Decoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = transformers.GPT2Config(vocab_size=V, n_embd=32, n_layer=LAYERS, n_head=2)
            self.embedding, self.parts = torch.nn.Embedding(V, 32), torch.nn.ModuleList(Block() for _ in range(LAYERS))

        def forward(self, tokens):
            x = self.embedding(tokens)
            for part in self.parts:
                x = part(x)
            return x @ self.embedding.weight.T

    decoder = Decoder()
    refused("decoder: expected a Retro, or a decoder with", retrofit, decoder, **ADDED, error=TypeError)
    model = retrofit(decoder, blocks=decoder.parts, attention="mix", **ADDED)
    assert isinstance(model, RetrofittedDecoder)
    assert torch.equal(model(batch()[0]), decoder(batch()[0]))


def test_errors_name_the_argument():
    refused("cca_layers: expected at least one layer", retrofit, ours(), cca_layers=())
    refused("cca_layers: expected ascending layers from 1 to num_layers=3", retrofit, gpt2(), cca_layers=(4,))
    refused(r"decoder: expected a Retro without retrieval", retrofit, retrofit(ours(), **ADDED), **ADDED)
    decoder = gpt2()
    with pytest.raises(ValueError, match="attention: expected the name"):
        retrofit(decoder, blocks=decoder.transformer.h, attention="nothing", **ADDED)
    model, (tokens, neighbours, mask) = retrofit(decoder, **ADDED), batch()
    refused("neighbours: ", model, tokens, neighbours[:, :2])
    decoders.assert_wrong_input_is_named(model, tokens, neighbours, mask)


def test_the_function_has_the_name_of_its_package():
    """`retro_model.retrofit` is the function, whether the subpackage or the function is imported first."""
    same = ["from retro_model import retrofit", "import retro_model.retrofit.rpt"]
    same += [
        "from retro_model.retrofit import own, retrofit as same",
        "assert retro_model.retrofit is retrofit is same",
    ]
    code = "import os, torch\nif os.fork():\n    assert os.wait()[1] == 0\n    import retro_model\n"
    code += "else:\n    from retro_model.retrofit import base\n"
    python("-c", code + "\n".join(same))


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


def published(name: str, changes: dict):
    torch.manual_seed(0)
    sizes = changes | {"vocab_size": V} if name == "GPTJ" else SIZES | changes
    config = getattr(transformers, f"{name}Config")(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize("name", FIT)
def test_blocks_that_add_and_go_on_from_the_sum_fit(name):
    decoder = published(name, FIT[name])
    tokens, neighbours, mask = batch()
    with torch.no_grad():
        want = decoder(tokens).logits
        model = retrofit(decoder, **ADDED).eval()
        assert torch.equal(model(tokens, neighbours, neighbour_mask=mask), want)  # starts without effect


@pytest.mark.parametrize("name", UNFIT)
def test_other_blocks_are_refused_by_name(name):
    message = rf"decoder: expected blocks that add their attention's output.*; got {name}\w*, whose output differs"
    refused(message, retrofit, published(name, UNFIT[name]), **ADDED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_tell_the_blocks_apart_too(dtype):
    retrofit(published("Mistral", FIT["Mistral"]).to(dtype), **ADDED)
    refused("got PhiDecoderLayer", retrofit, published("Phi", {}).to(dtype), **ADDED)


def test_heads_that_the_kernels_do_not_take():
    """Heads of 100: the cross-attention has its own width."""
    changes = {"hidden_size": 200, "num_key_value_heads": 1}
    with pytest.raises(ValueError, match="head_dim: expected a multiple of 8 from 16 to 256; got 100"):
        retrofit(published("Llama", changes), **ADDED)
    assert retrofit(published("Llama", changes), **ADDED, head_dim=16).cca["2"].head_dim == 16


@pytest.mark.parametrize("decoder", [gpt2, llama])
def test_padding_on_the_left(decoder):
    _, model = retrofitted(decoder, effect=True)
    model.double().eval()
    close = lambda got, want: assert_passes("logits", got, want, None, torch.float64)  # noqa: E731
    decoders.assert_padding_on_the_left_changes_nothing(model, M, *batch(), close)


@pytest.mark.parametrize("decoder", [gpt2, llama])
def test_checkpointing_changes_no_gradient(decoder):
    _, model = retrofitted(decoder, effect=True)
    batches = [batch(0), batch(1, K=1)]  # encoded once in each pass, again in each backward pass
    decoders.assert_checkpointing_changes_no_gradient(model.double().train(), batches, model.encoder, (2, 4))
    model.gradient_checkpointing_enable()
    assert not any(m.training for m in model.train().decoder.modules() if isinstance(m, torch.nn.Dropout))
    refused("use_reentrant: expected False", model.gradient_checkpointing_enable, {"use_reentrant": True})


@pytest.mark.parametrize("inner", [False, True])
def test_adapters_and_cross_attention_train_together(inner):
    """retrofit(peft) and retrofit(wrapped model): LoRA, CCA and encoder learn, the decoder's own weights stay."""
    torch.manual_seed(0)
    peft_model = decoders.lora(llama())
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
    model = decoders.lora(retrofit(llama(), **ADDED), task_type=None).train()
    refused(r"put PEFT into the decoder first, retrofit\(get_peft_model", model, *batch()[:2], error=RuntimeError)
    with torch.no_grad():
        model(*batch()[:2])


def test_lora_dropout_follows_the_mode_and_the_decoders_own_does_not():
    model = retrofit(decoders.lora(llama(), lora_dropout=0.5), **ADDED)
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
