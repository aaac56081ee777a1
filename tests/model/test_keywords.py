"""Every keyword of a retrofit's forward and of `generate` is served, or refused by its name."""

import copy

import pytest
import torch

from retro_model.retrofit import retrofit
from retro_model.retrofit.decoders import cache_name
from retro_model.retrofit.rpt import retrofit_rpt
from tests.model import decoders
from tests.model.test_own_attention import make
from tests.model.test_retrofit import ADDED, LAYERS, K, M, R, V, retrieve
from tests.refusals import refused

transformers = pytest.importorskip("transformers")
huggingface = pytest.importorskip("retro_model.integrations.huggingface")
DynamicCache, GenerationConfig = transformers.DynamicCache, transformers.GenerationConfig
CACHE = cache_name(decoders.llama(V, 1))
every_kind = pytest.mark.parametrize("kind", ["own", "new"])
N = 2 * M + 3


def decoder(name="llama"):
    torch.manual_seed(0)
    return (decoders.gpt2(V, LAYERS) if name == "gpt2" else decoders.llama(V, LAYERS)).double().eval()


def whole(kind="own", made=None):
    """A retrofit for the library whose neighbours matter."""
    made = decoder() if made is None else made
    options = {"own": dict(neighbours="own", chunk_len=M, neighbour_len=R, sink_token=1)}
    options["new"] = ADDED | {"cca_output": "fresh"}
    torch.manual_seed(1)
    model = huggingface.RetrofitForCausalLM.from_decoder(made, **options[kind]).eval()
    if kind == "own":
        torch.nn.init.ones_(model.model.bias)
    return model


def batch(count=N, rows=2):
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(V, (rows, count), generator=g)
    return tokens, torch.randint(V, (rows, count // M, K, R), generator=g)


def greedy(**options):
    return {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 2 * M + 1} | options


PARTING = {"use_cache": False, "cache_implementation": "static", "guidance_scale": 2.0}
#: Options that choose another mode of generation, and the mode.
MODES = {
    "num_beams": (2, "beam_search"),
    "prompt_lookup_num_tokens": (3, "assisted_generation"),
    "penalty_alpha": (0.5, "contrastive_search"),
}


@pytest.mark.parametrize("source", ["argument", "generation_config", "the model's", "the decoder's"])
@pytest.mark.parametrize("name", [*PARTING, *MODES])
def test_generation_that_would_part_rows_from_neighbours_is_refused(name, source):
    made, value = decoder(), PARTING[name] if name in PARTING else MODES[name][0]
    if source == "the decoder's":
        setattr(made.generation_config, name, value)
    model, options = whole(made=made), greedy()
    if source == "argument":
        options[name] = value
    elif source == "generation_config":
        options = {"generation_config": GenerationConfig(**options | {name: value})}
    elif source == "the model's":
        model.generation_config = GenerationConfig(**{name: value})
    called, got = [], value if name in PARTING else MODES[name][1]
    named = name if name in PARTING else "generation_config"
    with pytest.raises(ValueError, match=f"^{named}: expected .* in a generation that retrieves; got {got}"):
        model.generate(batch()[0], retrieve=lambda chunks: called.append(1) or retrieve(chunks), **options)
    assert not called


def test_what_only_a_call_can_ask_for_is_refused_by_name():
    model, (tokens, neighbours) = whole(), batch()
    wrong = {
        "custom_generate": lambda *_: None,
        "neighbours": neighbours,
        "inputs_embeds": torch.zeros(2, N, 32),
        "negative_prompt_ids": tokens,
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"^{name}: expected None in a generation that retrieves; got a "):
            model.generate(tokens, retrieve=retrieve, **greedy(), **{name: value})
    with pytest.raises(ValueError, match=r"generation_config: .*; got assisted_generation"):
        model.generate(tokens, retrieve=retrieve, **greedy(), assistant_model=decoder())
    static = transformers.StaticCache(config=decoder().config, max_cache_len=64)
    refused("got a StaticCache", model.generate, tokens, retrieve=retrieve, **greedy(), **{CACHE: static})
    with pytest.raises(ValueError, match="output_hidden_states: not supported"):
        model.generate(tokens, retrieve=retrieve, **greedy(output_hidden_states=True, return_dict_in_generate=True))


@every_kind
def test_served_options_of_generate_change_no_token(kind):
    model, tokens = whole(kind), batch(M + 3)[0]
    want = model.generate(tokens, retrieve=retrieve, **greedy())
    assert not torch.equal(want, model.generate(tokens, retrieve=None, **greedy()))
    positions = torch.arange(M + 3)[None]
    served = [
        {"cache_implementation": "dynamic"},
        {"prefill_chunk_size": 3},
        {"position_ids": positions},
        {CACHE: DynamicCache(config=model.model.decoder.config)},
        {"use_cache": True, "num_beams": 1},
    ]
    for options in served:
        assert torch.equal(model.generate(tokens, retrieve=retrieve, **greedy(**options)), want), options
    sampled = model.generate(tokens, retrieve=retrieve, **greedy(do_sample=True, num_return_sequences=3, top_k=1))
    assert torch.equal(sampled, want.repeat_interleave(3, 0))
    out = model.generate(
        tokens, retrieve=retrieve, **greedy(output_scores=True, output_logits=True, return_dict_in_generate=True)
    )
    assert torch.equal(out.sequences, want) and len(out.logits) == len(out.scores) == 2 * M + 1


@every_kind
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_without_retrieval_generation_is_the_decoders_own(kind, name):
    """All options of the library, also those that a generation with retrieval refuses."""
    before = decoder(name)
    tokens, model = batch(M + 3)[0], whole(kind, copy.deepcopy(before))
    helper = decoders.llama(V, 1).double().eval()
    for options in (
        {"num_beams": 3},
        {"use_cache": False},
        {"cache_implementation": "static", "disable_compile": True},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": helper},
        {"output_hidden_states": True, "return_dict_in_generate": True},
    ):
        rows = tokens[:1] if {"prompt_lookup_num_tokens", "assistant_model"} & options.keys() else tokens
        got, want = (
            m.generate(rows, **greedy(**options), **more) for m, more in ((model, {"retrieve": None}), (before, {}))
        )
        assert torch.equal(getattr(got, "sequences", got), getattr(want, "sequences", want)), options
        if "output_hidden_states" in options:
            assert torch.equal(got.hidden_states[0][1], want.hidden_states[0][1])
    model.generation_config = GenerationConfig(**greedy(max_new_tokens=2))
    assert model.generate(tokens, retrieve=None).shape[1] == M + 5


@every_kind
def test_a_cache_goes_on_from_generation_to_generation(kind):
    """A second turn over the same cache, and two continuations of copies of one prompt's cache."""
    model, tokens = whole(kind), batch(M + 3)[0]
    options = greedy(return_dict_in_generate=True, max_new_tokens=M)
    first = model.generate(tokens, retrieve=retrieve, **options)
    past = getattr(first, CACHE)
    longer = torch.cat([first.sequences, tokens[:, :5]], 1)
    options["attention_mask"] = torch.ones_like(longer)  # token 0 is not padding
    want = model.generate(longer, retrieve=retrieve, **options).sequences
    for _ in range(2):
        held = {CACHE: copy.deepcopy(past)}
        assert torch.equal(model.generate(longer, retrieve=retrieve, **options, **held).sequences, want)


@every_kind
@torch.no_grad()
def test_a_cache_that_holds_other_tokens_is_refused(kind):
    model, (tokens, _) = whole(kind), batch()
    message = r"^cache: expected the {} tokens that this model has read into it; got {} tokens"
    foreign = DynamicCache()
    model.model.decoder(tokens, **{CACHE: foreign})
    refused(message.format(0, N), model, tokens[:, :1], cache=foreign)
    own = DynamicCache()
    model(tokens, cache=own)
    own.crop(5) if own.get_seq_length() - 5 == 5 else own.crop(-5)
    refused(message.format(N, own.get_seq_length()), model, tokens[:, :1], cache=own)
    with pytest.raises(ValueError, match=message.format(N, own.get_seq_length())):
        model.generate(tokens, retrieve=retrieve, **greedy(), **{CACHE: own})
    for past in (foreign, own):
        with pytest.raises(ValueError, match="use_cache: expected None or True with a cache that holds tokens"):
            model(tokens[:, :1], cache=past, use_cache=False)
    inner, cache = model.model, model.model.make_cache(2)
    inner(tokens[:, :4], cache=cache)
    inner.decoder(tokens[:, :1], **{CACHE: cache.decoder})
    refused(message.format(4, 5), inner, tokens[:, 4:5], cache=cache)


@every_kind
@torch.no_grad()
def test_a_cache_is_made_on_request(kind):
    model, (tokens, neighbours) = whole(kind), batch()
    want = model(tokens, neighbours=neighbours).logits
    first = model(tokens[:, : M + 1], neighbours=neighbours[:, :1], use_cache=True)
    past = getattr(first, CACHE)
    assert past.get_seq_length() == M + 1
    rest = model(tokens[:, M + 1 :], neighbours=neighbours[:, 1:], **{CACHE: past})
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), want, rtol=0, atol=1e-11)
    assert getattr(model(tokens), CACHE) is None and getattr(model(tokens, use_cache=False), CACHE) is None
    got = model(tokens, neighbours=neighbours, use_cache=False, return_dict=False)
    assert type(got) is tuple and torch.equal(got[0], want)
    with pytest.raises(ValueError, match="use_cache: expected no cache in training with labels"):
        model.train()(tokens, labels=tokens, use_cache=True)


@every_kind
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_positions_may_be_shifted(kind, name):
    """Rotary positions are relative, so a shift changes nothing; learned positions change, with and without a cache."""
    model, (tokens, neighbours) = whole(kind, decoder(name)), batch()
    inputs, shifted = {"neighbours": neighbours}, torch.arange(N)[None] + 5
    plain = model(tokens, **inputs).logits
    for positions in (shifted, shifted.expand(2, -1), torch.stack([shifted[0], shifted[0] + 3])):
        got = model(tokens, position_ids=positions, **inputs).logits
        if name == "llama":
            torch.testing.assert_close(got, plain, rtol=0, atol=1e-6)  # rotary tables are float32
        else:
            assert (got - plain).abs().max() > 1e-3
        past, parts = DynamicCache(), []
        for at, chunk in ((slice(0, M + 1), slice(0, 1)), (slice(M + 1, N), slice(1, None))):
            near = neighbours[:, chunk]
            parts.append(model(tokens[:, at], position_ids=positions[:, at], neighbours=near, cache=past).logits)
        torch.testing.assert_close(torch.cat(parts, 1), got, rtol=0, atol=1e-11)
    loss = model.model(tokens, neighbours, loss_mask=torch.ones_like(tokens), position_ids=shifted)
    assert loss.total.isfinite()


@every_kind
@torch.no_grad()
def test_positions_of_padded_rows_are_the_callers(kind):
    model, (tokens, neighbours) = whole(kind), batch()
    real = torch.ones_like(tokens).index_fill(1, torch.arange(M), 0)
    real[0] = 1
    inputs = {"attention_mask": real, "neighbours": neighbours}
    own = (real.cumsum(1) - 1).clamp(min=0)
    want = model(tokens, **inputs).logits
    for positions in (own, torch.where(real == 1, own + 7, 1)):
        got = model(tokens, position_ids=positions, **inputs).logits
        torch.testing.assert_close(got[0], want[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(got[1, M:], want[1, M:], rtol=0, atol=1e-6)


@every_kind
@torch.no_grad()
def test_packed_rows_are_refused_where_chunks_would_cross_documents(kind):
    model, (tokens, neighbours) = whole(kind), batch()
    packed = torch.cat([torch.arange(7), torch.arange(N - 7)])[None]
    message = "^position_ids: expected positions that increase by one .*; got packed rows or gaps"
    for options in ({"neighbours": neighbours}, {"use_cache": True}, {"cache": DynamicCache()}):
        refused(message, model, tokens, position_ids=packed, **options)
    want = model.model.decoder(tokens, position_ids=packed).logits  # the decoder's own, without retrieval
    assert torch.equal(model(tokens, position_ids=packed).logits, want)
    refused(r"position_ids: .*N=19", model, tokens, position_ids=packed[:, :4], neighbours=neighbours)
    with pytest.raises(TypeError, match=r"position_ids: expected torch.int64; got torch.float32"):
        model(tokens, position_ids=packed.float(), neighbours=neighbours)


@every_kind
@torch.no_grad()
def test_a_mask_that_a_cache_does_not_know_is_refused(kind):
    model, (tokens, _) = whole(kind), batch()
    right = torch.ones_like(tokens).index_fill(1, torch.tensor([N - 1]), 0)
    message = "attention_mask: expected padding before a row's tokens alone with a cache"
    refused(message, model, tokens, attention_mask=right, use_cache=True)
    refused(message, model.model, tokens, attention_mask=right, cache=model.model.make_cache(2))
    past = DynamicCache()
    model(tokens, cache=past, attention_mask=torch.ones_like(tokens))
    message = rf"^attention_mask: expected \[2, {N + 1}\], 0 on the padding of the first"
    hole = torch.ones(2, N + 1).index_fill(1, torch.tensor([3]), 0)
    for mask in (torch.ones(2, 1), hole, torch.ones(2, 1, 1, N + 1)):
        refused(message, model, tokens[:, :1], cache=past, attention_mask=mask)
    model(tokens[:, :1], cache=past, attention_mask=torch.ones(2, N + 1))


REFUSED = {
    "inputs_embeds": torch.zeros(2, N, 32),
    "output_hidden_states": True,
    "output_attentions": True,
    "output_router_logits": True,
}
UNKNOWN = {"neighbors": None, "token_type_ids": torch.zeros(2, N), "is_causal": False, "cu_seq_lens_q": torch.arange(3)}


@pytest.mark.parametrize("training", [True, False])
@every_kind
def test_keywords_are_refused_by_name(kind, training):
    model, (tokens, neighbours) = whole(kind).train(training), batch()
    for name, value in REFUSED.items():
        for inputs in ({"input_ids": tokens}, {"input_ids": tokens, "labels": tokens}):
            refused(f"^{name}: not supported by a retrofitted decoder", model, **inputs, **{name: value})
        refused(f"^{name}: not supported by a retrofitted decoder", model.model, tokens, neighbours, **{name: value})
        if name != "output_router_logits":
            model(tokens, **{name: None})
    refused(r"^inputs_embeds: ", model, inputs_embeds=REFUSED["inputs_embeds"])
    for name, value in UNKNOWN.items():
        for call in (model, model.model):
            with pytest.raises(TypeError, match=f"^{name}: expected a keyword of the model or of LlamaForCausalLM.for"):
                call(tokens, **{name: value})
    refused("logits_to_keep: expected None with labels", model, tokens, labels=tokens, logits_to_keep=1)
    with pytest.raises(ValueError, match="logits_to_keep: expected None with loss_mask"):
        model.model(tokens, neighbours, loss_mask=torch.ones_like(tokens), logits_to_keep=1)
    with pytest.raises(ValueError, match="use_cache: expected None or False without a cache of make_cache; got True"):
        model.model(tokens, neighbours, use_cache=True)
    with pytest.raises(ValueError, match="use_cache: expected None or True with a cache; got False"):
        model.model(tokens, cache=model.model.make_cache(2), use_cache=False)
    with pytest.raises(ValueError, match="past_key_values: expected None next to cache"):
        model(tokens, cache=DynamicCache(), past_key_values=DynamicCache())


@torch.no_grad()
def test_keywords_of_the_decoder_are_handed_on():
    model, (tokens, neighbours) = whole(made=decoder("gpt2")), batch()
    want = model(tokens, neighbours=neighbours).logits
    last = model(tokens, neighbours=neighbours, logits_to_keep=2).logits
    torch.testing.assert_close(last, want[:, -2:], rtol=0, atol=1e-12)
    types = torch.ones_like(tokens)
    assert not torch.allclose(model(tokens, neighbours=neighbours, token_type_ids=types).logits, want)


@torch.no_grad()
def test_a_retrofit_that_reads_its_own_past_refuses_the_same():
    model = retrofit_rpt(decoder(), chunk_len=M, num_neighbours=2).eval()
    tokens = batch()[0]
    for name, value in (REFUSED | {"labels": tokens}).items():
        refused(f"^{name}: not supported by a retrofitted decoder", model, tokens, **{name: value})
    refused(r"^neighbors: expected a keyword", model, tokens, neighbors=None, error=TypeError)
    left = torch.ones_like(tokens).index_fill(1, torch.tensor([0]), 0)
    packed = torch.cat([torch.arange(7), torch.arange(N - 7)])[None]
    refused("attention_mask: expected padding after a row's tokens alone", model, tokens, attention_mask=left)
    refused("position_ids: expected positions that increase by one", model, tokens, position_ids=packed)
    want = model.decoder(tokens, position_ids=packed).logits
    assert torch.equal(model(tokens, position_ids=packed, retrieval=False), want)
    for name, value in {"attention_mask": torch.ones_like(tokens), "position_ids": packed}.items():
        refused(f"{name}: expected None with a cache", model, tokens, cache=model.make_cache(2), **{name: value})


@torch.no_grad()
def test_own_attention_refuses_keys_of_unfilled_columns():
    model = retrofit(make("Llama"), neighbours="own", chunk_len=M, neighbour_len=R).eval()
    cache = model.make_cache(2)
    cache.decoder = transformers.StaticCache(config=model.decoder.config, max_cache_len=64)
    tokens, neighbours = batch()
    refused(f"cache: expected keys of the {N} columns so far; got 64", model, tokens, neighbours, cache=cache)
