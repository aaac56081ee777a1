"""Retrofit by the decoder's own attention, with and without a prefix in front of every text and neighbour, against one
softmax over all keys (`joint.py`).
"""

import contextlib
import copy
import functools
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from retro_model import evaluation
from retro_model.generation import generate
from retro_model.retrofit import own as own_module
from retro_model.retrofit import retrofit
from tests.model import decoders, joint, toys
from tests.refusals import refused

transformers = pytest.importorskip("transformers")

V, M, R, K, N, LAYERS, HEADS = 50, 4, 6, 2, 19, 3, 4
SIZES = dict(
    vocab_size=V,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "rope_theta": 100.0,
    "original_max_position_embeddings": 16,
}
FULL, WINDOW = "full_attention", "sliding_attention"
EXPERTS = dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, experts_implementation="eager")
DECODERS = {
    "Llama": dict(num_key_value_heads=2),
    "Llama yarn": dict(num_key_value_heads=1, rope_parameters=YARN),
    "Llama llama3": dict(num_key_value_heads=1, rope_parameters=LLAMA3),
    "Llama eager": dict(num_key_value_heads=2, attn_implementation="eager"),
    "Mistral": dict(num_key_value_heads=2),
    "Mistral window": dict(num_key_value_heads=2, sliding_window=5),
    "Qwen2": dict(num_key_value_heads=2),
    "Qwen3": dict(num_key_value_heads=2, head_dim=24),
    "Mixtral": dict(num_key_value_heads=2, num_local_experts=4, experts_implementation="eager"),
    "Qwen2Moe": dict(num_key_value_heads=2, shared_expert_intermediate_size=16) | EXPERTS,
    "Qwen2Moe window": dict(num_key_value_heads=2, shared_expert_intermediate_size=16)
    | EXPERTS
    | dict(use_sliding_window=True, sliding_window=5, layer_types=[WINDOW, FULL, WINDOW]),
    "Qwen3Moe": dict(num_key_value_heads=2, head_dim=24) | EXPERTS,
    "Gemma": dict(num_key_value_heads=1, head_dim=16),
    "Gemma2 eager": dict(num_key_value_heads=2, head_dim=16, attn_logit_softcapping=None, sliding_window=5),
    "Gemma3": dict(num_key_value_heads=2, head_dim=16, sliding_window=5, layer_types=[WINDOW, FULL, WINDOW]),
    "Phi3": dict(num_key_value_heads=2, partial_rotary_factor=0.5),
    "Phi3 window": dict(num_key_value_heads=2, sliding_window=5),
    "SmolLM3": dict(num_key_value_heads=2, no_rope_layers=[1, 0, 1]),
    "SmolLM3 window": dict(num_key_value_heads=2, no_rope_layers=[0, 1, 1], use_sliding_window=True, sliding_window=5),
    "Olmo": dict(num_key_value_heads=2, clip_qkv=1.0),
    "Olmo2": dict(num_key_value_heads=2),
    "Olmo3": dict(num_key_value_heads=2, sliding_window=5, layer_types=[WINDOW, FULL, WINDOW]),
    "Granite": dict(num_key_value_heads=2)
    | dict(attention_multiplier=0.2, residual_multiplier=0.5, embedding_multiplier=3.0, logits_scaling=2.0),
    "Starcoder2": dict(num_key_value_heads=2, sliding_window=5),
    "StableLm": dict(num_key_value_heads=2, partial_rotary_factor=0.5),
    "StableLm parallel": dict(num_key_value_heads=2, use_parallel_residual=True, qk_layernorm=True),
    "Ministral": dict(num_key_value_heads=2, head_dim=16, sliding_window=5, layer_types=[FULL, WINDOW, FULL]),
    "Nemotron": dict(num_key_value_heads=2, partial_rotary_factor=0.5),
    "GPT2": dict(n_positions=64),
    "GPT2 by layer": dict(n_positions=64, scale_attn_by_inverse_layer_idx=True),
    "GPTNeoX": dict(rotary_pct=0.5),
}
PREFIX = (1, 17, 4, 33, 9)
CONFIGS = {"Gemma3": "Gemma3Text"}
CACHED = ("Llama", "Mistral window", "Gemma3", "SmolLM3 window", "StableLm", "GPT2", "GPTNeoX")
every_decoder = pytest.mark.parametrize("name", DECODERS)


def make(name: str, **changes):
    torch.manual_seed(0)
    kind = name.split()[0]
    config = getattr(transformers, f"{CONFIGS.get(kind, kind)}Config")(**SIZES | DECODERS[name] | changes)
    decoder = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    for p in decoder.parameters():  # sharper than initial weights, so that attended keys matter
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=2 * p.shape[-1] ** -0.5)
    return decoder.double().eval()


def batch(seed: int = 0, *, n: int = N, k: int = K):
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(2, n // M, k, R, generator=g) > 0.2
    mask[0, 1], mask[1, 0, k - 1] = False, False  # a chunk without neighbours, an empty neighbour
    return torch.randint(V, (2, n), generator=g), torch.randint(V, (2, n // M, k, R), generator=g), mask


def own(name: str, trained: bool = True, **changes):
    """Return the original decoder and a copy that attends neighbours, with weights as if trained."""
    decoder = make(name)
    before = copy.deepcopy(decoder)
    model = retrofit(decoder, neighbours="own", **{"chunk_len": M, "neighbour_len": R} | changes).eval()
    if trained:
        torch.manual_seed(1)
        torch.nn.init.normal_(model.bias)
        torch.nn.init.normal_(model.scale)
    return before, model


def joint_logits(before, model, tokens, neighbours, mask, **changes):
    options = dict(bias=model.bias, scale=model.scale, layers=list(model.config.cca_layers), chunk_len=M, sink=1)
    options |= {"second_look": model.config.second_look}
    options["prefix"] = torch.tensor(model.config.prefix) if model.config.prefix else None
    return torch.stack([joint.logits(before, *row, **options | changes) for row in zip(tokens, neighbours, mask)])


@pytest.mark.parametrize(
    "name, options",
    [
        *((name, {"prefix": prefix}) for name in DECODERS for prefix in ((), PREFIX)),
        ("Llama", {"prefix": PREFIX, "cca_layers": (2,)}),  # the other layers attend the prefix too
    ],
)
@torch.no_grad()
def test_equals_one_softmax_over_own_and_neighbours_keys(name, options):
    before, model = own(name, **options)
    tokens, neighbours, mask = batch()
    got = model(tokens, neighbours, neighbour_mask=mask)
    close = 1e-5 if "eager" in name else 1e-12  # the library's eager softmax is float32 in every type
    torch.testing.assert_close(got, joint_logits(before, model, tokens, neighbours, mask), rtol=0, atol=close)
    assert (got - before(tokens).logits).abs().max() > 0.1


@torch.no_grad()
def test_some_layers_another_sink_and_no_mask():
    before, model = own("Llama", cca_layers=(1, 3), sink_token=7)
    tokens, neighbours, mask = batch()
    want = joint_logits(before, model, tokens, neighbours, torch.ones_like(mask), sink=7)
    torch.testing.assert_close(model(tokens, neighbours), want, rtol=0, atol=1e-12)
    whole = model(tokens, neighbours, neighbour_mask=torch.ones_like(mask[..., 0]))
    torch.testing.assert_close(whole, want, rtol=0, atol=1e-12)
    # chunks beyond the last complete one change nothing
    more = torch.cat([neighbours, neighbours[:, :1]], 1)
    torch.testing.assert_close(model(tokens, more), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["Llama yarn", "GPT2", "GPTNeoX"])
def test_low_rank_maps_adapt_queries_and_values(name):
    before, plain = own(name)
    _, model = own(name, rank=2)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        *("bias", "scale", "query_down", "query_up", "value_down", "value_up")
    }
    tokens, neighbours, mask = batch()
    with torch.no_grad():
        start = model(tokens, neighbours, neighbour_mask=mask)
        torch.testing.assert_close(start, plain(tokens, neighbours, neighbour_mask=mask), rtol=0, atol=1e-12)
        for up in (model.query_up, model.value_up):
            torch.nn.init.normal_(up)
        pairs = ((model.query_down, model.query_up), (model.value_down, model.value_up))
        maps = [torch.eye(down.shape[2]) + down @ up for down, up in pairs]
        got = model(tokens, neighbours, neighbour_mask=mask)
        want = joint_logits(before, model, tokens, neighbours, mask, maps=maps)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert (got - start).abs().max() > 0.1
    model(tokens, neighbours, neighbour_mask=mask).square().mean().backward()
    assert all((p.grad != 0).any() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["Llama yarn", "Mistral window", "GPT2", "GPTNeoX"])
def test_gradients_of_bias_and_scale_are_those_of_one_softmax(name):
    before, model = own(name, cca_layers=(1, 3))
    given = batch()
    got, want = model(*given[:2], neighbour_mask=given[2]), joint_logits(before, model, *given)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mine, theirs = (torch.autograd.grad((logits * weights).sum(), [model.bias, model.scale]) for logits in (got, want))
    for one, other in zip(mine, theirs):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@every_decoder
@torch.no_grad()
def test_off_is_the_decoder_to_the_bit(name):
    before, model = own(name)
    tokens, neighbours, mask = batch()
    want, want_short = before(tokens).logits, before(tokens[:, : M - 1]).logits
    for mode in (model.eval(), model.train()):
        assert torch.equal(mode(tokens), want)
        assert torch.equal(mode(tokens[:, : M - 1], neighbours[:, :0]), want_short)
    model.eval()(tokens, neighbours, neighbour_mask=mask)
    assert torch.equal(model(tokens), want)  # a pass with neighbours changes no state
    assert torch.equal(model.decoder(tokens).logits, want)
    nothing = torch.zeros_like(mask)
    assert torch.equal(model(tokens, neighbours, neighbour_mask=nothing), want)


def test_bias_and_scale_alone_train():
    _, model = own("Llama", trained=False, bias=-1.5, cca_layers=(2, 3))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {name: p.shape for name, p in trained.items()} == {"bias": (2, HEADS), "scale": (2, HEADS)}
    assert (model.bias == -1.5).all() and (model.scale == 1).all()
    tokens, neighbours, mask = batch()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.train()(tokens, neighbours, neighbour_mask=mask).logsumexp(-1).sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {"bias", "scale"}
    assert all((p.grad != 0).all() for p in trained.values())
    torch.optim.AdamW(trained.values(), lr=1e-2).step()
    assert {name for name, p in model.named_parameters() if not torch.equal(p, values[name])} == {"bias", "scale"}


@torch.no_grad()
def test_copies_and_pickles_attend_by_themselves():
    _, model = own("Llama")
    tokens, neighbours, mask = batch()
    on = model(tokens, neighbours, neighbour_mask=mask)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(tokens, neighbours, neighbour_mask=mask), on)
        other.bias.fill_(-torch.inf)
        torch.testing.assert_close(other(tokens, neighbours), other(tokens))
    assert torch.equal(model(tokens, neighbours, neighbour_mask=mask), on)


@torch.no_grad()
def test_each_distinct_neighbour_is_read_once_and_kept():
    _, model = own("Llama")
    tokens, neighbours, mask = batch()
    neighbours[:, 2:] = neighbours[:1, :1]
    want = model(tokens, neighbours, neighbour_mask=mask)
    rows = []
    model.decoder.model.embed_tokens.register_forward_hook(lambda module, args, out: rows.append(len(args[0])))
    live = neighbours[mask.any(-1)].unique(dim=0)
    assert torch.equal(model(tokens, neighbours, neighbour_mask=mask), want)
    assert rows == [len(live), 2]
    with model.keeping() as kept:
        for _ in range(2):
            assert torch.equal(model(tokens, neighbours, neighbour_mask=mask), want)
        assert rows[2:] == [len(live), 2, 2] and (kept.found, kept.read) == (len(live), len(live))
        model.decoder.model.embed_tokens.weight.mul_(1.5)  # the decoder has changed
        model(tokens, neighbours, neighbour_mask=mask)
        assert rows[-2:] == [len(live), 2]
    one = 2 * R * LAYERS * 2 * 16 * 8  # bytes of a neighbour: keys and values of two heads of 16 in float64
    with model.keeping(3 * one) as kept:
        changed = model(tokens, neighbours, neighbour_mask=mask)
        assert kept.bytes == 3 * one and len(kept) == 3
        assert torch.equal(model(tokens, neighbours, neighbour_mask=mask), changed)


@torch.no_grad()
def test_neighbours_are_read_up_to_the_last_layer_that_attends():
    _, model = own("Llama", cca_layers=(1, 2))
    neighbours = batch()[1]
    entered, left = [], []
    for place, layer in enumerate(model.decoder.model.layers):
        layer.register_forward_pre_hook(lambda *_, place=place: entered.append(place))
        layer.mlp.register_forward_hook(lambda *_, place=place: left.append(place))
    model.neighbour_states(neighbours.flatten(0, 2))
    assert (entered, left) == ([0, 1], [0])


def count_reads(model) -> list[int]:
    """Record the number of neighbours that each later call reads."""
    rows, states = [], model.neighbour_states
    model.neighbour_states = lambda neighbours: rows.append(len(neighbours)) or states(neighbours)
    return rows


@torch.no_grad()
def test_kept_states_are_those_of_the_decoders_configuration():
    """Equal weights give other states if the window is another."""
    _, model = own("Mistral window")
    tokens, neighbours, mask = batch()
    with model.keeping():
        before = model(tokens, neighbours, neighbour_mask=mask)
        model.decoder.config.sliding_window += 3
        got = model(tokens, neighbours, neighbour_mask=mask)
    assert torch.equal(got, model(tokens, neighbours, neighbour_mask=mask)) and not torch.equal(got, before)


@torch.no_grad()
def test_states_that_autocast_read_serve_autocast_alone():
    model = own("Llama")[1].float()
    reads, (tokens, neighbours, mask) = count_reads(model), batch()
    want = model(tokens, neighbours, neighbour_mask=mask)
    with model.keeping(), torch.autocast("cpu", torch.bfloat16):
        model(tokens, neighbours, neighbour_mask=mask)
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(model(tokens, neighbours, neighbour_mask=mask), want)
    assert reads == [len(neighbours[mask.any(-1)].unique(dim=0))] * 3


@pytest.mark.parametrize(
    "name, steps, prefix",
    [
        *((name, steps, ()) for name in CACHED for steps in ([1] * N, [M - 1, 1, 3, 2 * M, N - 3 * M - 3], [N - 1, 1])),
        *((name, [6, 1, 1, 5, N - 13], PREFIX) for name in ("Llama", "GPT2", "Mistral window")),
    ],
    ids=str,
)
@torch.no_grad()
def test_decoding_with_a_cache_equals_the_whole(name, steps, prefix):
    _, model = own(name, prefix=prefix)
    given = batch()
    got = decoders.in_steps(model, steps, *given)
    torch.testing.assert_close(got, model(*given[:2], neighbour_mask=given[2]), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "GPTNeoX"])
@torch.no_grad()
def test_padding_on_the_left(name):
    _, model = own(name)
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-11)
    decoders.assert_padding_on_the_left_changes_nothing(model, M, *batch(), close)


def plain(chunks):
    return (chunks.repeat(1, 2)[:, None, :R] + torch.arange(K)[:, None]) % V, None


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_generation_is_greedy_continuation_of_the_whole(name):
    _, model = own(name)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [2, 7, 1, 8, 2]]
    texts = generate(model, prompts, 2 * M + 3, retrieve=plain)
    decoders.assert_greedy(model, plain, prompts, texts, M)
    assert [t.tolist() for t in generate(model, prompts, 2 * M + 3)] != [t.tolist() for t in texts]


def test_checkpointing_changes_no_gradient():
    _, model = own("Llama")
    part = model.decoder.model.layers[1].self_attn  # called in a reading and in a pass, again in each backward pass
    decoders.assert_checkpointing_changes_no_gradient(model.train(), [batch(0), batch(1, k=1)], part, (4, 6))


def test_a_bfloat16_decoder_keeps_what_is_added_in_float32():
    decoder = make("Llama").to(torch.bfloat16)
    model = retrofit(decoder, neighbours="own", chunk_len=M, neighbour_len=R)
    tokens, neighbours, mask = batch()
    logits = model.train()(tokens, neighbours, neighbour_mask=mask)
    assert logits.dtype == torch.bfloat16 and model.bias.dtype == model.scale.dtype == torch.float32
    logits.float().logsumexp(-1).sum().backward()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    optimizer.step()
    assert {s.dtype for state in optimizer.state.values() for s in state.values()} == {torch.float32}


def test_autocast_and_time_by_part():
    """Under autocast the error is at most twice the error of the decoder alone."""
    decoder = make("Llama").float()
    tokens, neighbours, mask = batch()
    alone = decoder(tokens).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        alone_error = (decoder(tokens).logits.float() - alone).norm() / alone.norm()
    model = retrofit(decoder, neighbours="own", chunk_len=M, neighbour_len=R, rank=2).train()
    want = model(tokens, neighbours, neighbour_mask=mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = model(tokens, neighbours, neighbour_mask=mask)
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).norm() / want.norm() < 2 * alone_error
    got.float().logsumexp(-1).sum().backward()
    assert model.bias.grad.dtype == torch.float32 and model.bias.grad.isfinite().all()


REFUSED = {
    "Bloom": dict(n_layer=2, n_head=4, hidden_size=64),
    "Falcon": dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=64),
    "GPTJ": dict(n_embd=64, n_layer=2, n_head=4, rotary_dim=8),
    "Cohere": SIZES | dict(num_key_value_heads=2),
    "Mamba": dict(hidden_size=64, num_hidden_layers=2),
    "Ministral3": SIZES | dict(num_key_value_heads=2, head_dim=16),
    "OPT": dict(hidden_size=64, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4),
    "Phi": SIZES,
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_decoders_are_refused_by_name(name):
    config = getattr(transformers, f"{name}Config")(**{"vocab_size": V} | REFUSED[name])
    decoder = getattr(transformers, f"{name}ForCausalLM")(config)
    refused(f"decoder: expected .*llama.*; got {name}", retrofit, decoder, neighbours="own", error=TypeError)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
LONG = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
UNSERVED = {
    "soft cap": ("Gemma2 eager", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping=None; got 50.0"),
    "both directions": ("Gemma3", dict(use_bidirectional_attention=True), "use_bidirectional_attention=False"),
    "not causal": ("Llama", dict(is_causal=False), "is_causal=True; got False"),
    "dynamic": ("Llama", dict(rope_parameters=DYNAMIC), "rotary positions whose frequencies are fixed; got 'dynamic'"),
    "by layer": (
        "Gemma3",
        dict(rope_parameters={FULL: DYNAMIC, WINDOW: YARN}),
        "whose frequencies are fixed; got 'dynamic'",
    ),
    "longrope": (
        "Phi3",
        dict(rope_parameters=LONG, partial_rotary_factor=1.0, original_max_position_embeddings=16),
        "whose frequencies are fixed; got 'longrope'",
    ),
}


@pytest.mark.parametrize("case", UNSERVED)
def test_settings_that_change_the_attention_are_refused_by_name(case):
    name, changes, match = UNSERVED[case]
    refused(f"decoder: expected .*{match}", retrofit, make(name, **changes), neighbours="own")


def test_the_guide_lists_the_decoders_that_are_tested():
    from transformers import AutoConfig

    guide = (Path(__file__).parents[2] / "docs" / "library.md").read_text()
    listed = re.search(r"Own attention supports ([^.]*)\.", guide)[1]
    kinds = {name.split()[0] for name in DECODERS}
    assert re.findall(r"`(\w+)`", listed) == sorted(kinds)
    assert {AutoConfig.for_model(kind).__class__.__name__ for kind in own_module.DECODERS} == {
        f"{CONFIGS.get(kind, kind)}Config" for kind in kinds
    }


def test_errors_name_the_argument():
    call = functools.partial(retrofit, make("Llama"), neighbours="own")
    refused("neighbours: expected 'new' or 'own'; got 'theirs'", call, neighbours="theirs")
    refused(r"cca_layers: expected ascending layers from 1 to num_layers=3; got \(0, 2\)", call, cca_layers=(0, 2))
    refused("cca_layers: expected at least one", call, cca_layers=())
    refused("chunk_len: ", call, chunk_len=0)
    refused("neighbour_len: ", call, neighbour_len=0)
    refused("bias: expected a finite number", call, bias=float("nan"))
    refused("rank: ", call, rank=-1)
    refused("sink_token: expected an int <= 49; got 50", call, sink_token=V)
    refused("unexpected keyword argument 'encoder_layers'", call, encoder_layers=1, error=TypeError)
    _, model = own("Llama")
    tokens, neighbours, mask = batch()
    refused(r"neighbours: expected \[B,L,K,R\] with L >= N//chunk_len = 4", model, tokens, neighbours[:, :2])
    decoders.assert_wrong_input_is_named(model, tokens, neighbours, mask)


def test_scores_are_the_same_and_the_neighbours_of_overlapping_windows_are_read_once():
    _, model = own("Llama")
    found = np.random.default_rng(0).integers(0, 30, (12, 2))
    store, database = toys.random_store(12, 4), toys.Database(toys.random_store(31, 4, seed=1))
    sizes, reads = {"window": 12, "stride": 4, "batch_size": 1}, count_reads(model)
    scores = evaluation.score(model, store, found, database, **sizes)
    once = sum(reads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "keeping", lambda _: contextlib.nullcontext())
        apart = evaluation.score(model, store, found, database, **sizes)
    np.testing.assert_allclose(scores.nats, apart.nats, rtol=1e-12)
    assert once <= len(np.unique(found)) < sum(reads) - once
    assert not model.keeps


@torch.no_grad()
def test_a_copy_has_a_cache_of_its_own():
    _, model = own("Llama")
    tokens, neighbours, mask = batch()
    with model.keeping() as kept:
        want = model(tokens, neighbours, neighbour_mask=mask)
        copied = copy.deepcopy(model)
        assert len(kept) and not len(copied._kept)
        assert torch.equal(copied(tokens, neighbours, neighbour_mask=mask), want)


@every_decoder
@torch.no_grad()
def test_without_neighbours_the_text_continues_the_prefix(name):
    before, model = own(name, prefix=torch.tensor(PREFIX))
    tokens = batch()[0]
    whole = torch.cat([torch.tensor(PREFIX).expand(len(tokens), -1), tokens], 1)
    close = 1e-5 if "eager" in name else 1e-12
    torch.testing.assert_close(model(tokens), before(whole).logits[:, len(PREFIX) :], rtol=0, atol=close)


@torch.no_grad()
def test_a_changed_weight_reads_the_prefix_again():
    _, model = own("Llama", prefix=PREFIX)
    tokens = batch()[0]
    first = model.prefix_states()
    assert model.prefix_states() is first
    model.decoder.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    fresh = retrofit(copy.deepcopy(model.decoder), neighbours="own", chunk_len=M, neighbour_len=R, prefix=PREFIX)
    assert torch.equal(model(tokens), fresh(tokens))


def test_wrong_prefixes_are_named():
    for prefix, message in (
        ((1, V), f"prefix: expected an int <= {V - 1}; got {V}"),
        ((1, 2.5), "prefix: expected an int"),
        ([1] * 64, "prefix: expected at most 63 tokens"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            retrofit(make("GPT2"), neighbours="own", chunk_len=M, neighbour_len=R, prefix=prefix)
    _, model = own("GPT2", prefix=PREFIX)
    assert model.config.max_len == 64 - len(PREFIX) and model.config.to_dict()["prefix"] == list(PREFIX)
    refused("tokens", model, torch.ones(1, 60, dtype=torch.int64), torch.ones(1, 15, K, R, dtype=torch.int64))
