"""Published models through the ops: outputs and gradients of the original."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

from retro_model.integrations.attention import NAME, use_retro_kernels  # noqa: E402


def t5(kind="T5"):
    sizes = dict(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
    distances = dict(relative_attention_num_buckets=8, relative_attention_max_distance=16)
    config = getattr(transformers, f"{kind}Config")(**sizes, **distances, dropout_rate=0.0, decoder_start_token_id=0)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def causal(kind, **more):
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2) | more
    if kind == "Llama":
        sizes |= dict(num_key_value_heads=1)
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))


def conformer():
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    convolutions = dict(conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), conv_depthwise_kernel_size=3)
    positions = dict(num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, position_embeddings_type="relative")
    dropouts = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "layerdrop")
    config = transformers.Wav2Vec2ConformerConfig(
        vocab_size=8, **sizes, **convolutions, **positions, **dict.fromkeys(dropouts, 0.0), apply_spec_augment=False
    )
    model = transformers.Wav2Vec2ConformerModel(config)
    for name, parameter in model.named_parameters():
        if "pos_bias" in name:
            torch.nn.init.normal_(parameter)
    return model


def tokens(batch=2, length=23):
    return torch.randint(1, 64, (batch, length), generator=torch.Generator().manual_seed(1))


def padding():
    mask = torch.ones(2, 23, dtype=torch.long)
    mask[1, 15:] = 0
    return mask


CASES = {
    "T5": (t5, lambda: {"input_ids": tokens(), "attention_mask": padding(), "decoder_input_ids": tokens(length=9)}),
    "mT5": (lambda: t5("MT5"), lambda: {"input_ids": tokens(), "decoder_input_ids": tokens(length=9)}),
    "umT5": (lambda: t5("UMT5"), lambda: {"input_ids": tokens(), "decoder_input_ids": tokens(length=9)}),
    "GPT-NeoX": (lambda: causal("GPTNeoX"), lambda: {"input_ids": tokens(), "attention_mask": padding()}),
    "Llama": (lambda: causal("Llama"), lambda: {"input_ids": tokens()}),
    "Wav2Vec2-Conformer": (
        conformer,
        lambda: {"input_values": torch.randn(2, 800, generator=torch.Generator().manual_seed(2))},
    ),
}


def result(model, inputs):
    outputs = model(**inputs)
    return outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state


@pytest.mark.parametrize("name", CASES)
def test_a_patched_model_is_the_original(name):
    torch.manual_seed(0)
    make, given = CASES[name]
    original = make().eval()
    patched = use_retro_kernels(copy.deepcopy(original))
    inputs = given()
    expected, got = result(original, inputs), result(patched, inputs)
    visible = torch.ones(expected.shape[:2], dtype=torch.bool)
    if "attention_mask" in inputs and "decoder_input_ids" not in inputs:
        visible = inputs["attention_mask"].bool()  # padded rows are not compared
    torch.testing.assert_close(got[visible], expected[visible], atol=2e-5, rtol=1e-4)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3)) * visible.unsqueeze(-1)
    (expected * weight).sum().backward()
    (got * weight).sum().backward()
    compared = 0
    for (key, a), b in zip(original.named_parameters(), patched.parameters(), strict=True):
        if a.grad is not None:
            compared += 1
            torch.testing.assert_close(b.grad, a.grad, atol=2e-4, rtol=2e-3, msg=lambda m, key=key: f"{key}: {m}")
    assert compared > 10


@pytest.mark.parametrize("name", ["T5", "Llama"])
def test_a_patched_model_generates_the_same_tokens(name):
    torch.manual_seed(0)
    original = CASES[name][0]().eval()
    patched = use_retro_kernels(copy.deepcopy(original))
    options = {"max_new_tokens": 12, "do_sample": False, "min_new_tokens": 12}
    assert original.generate(tokens(), **options).tolist() == patched.generate(tokens(), **options).tolist()


class Largest(TorchDispatchMode):
    """Largest number of elements of a tensor that a torch operation made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("kind", ["T5", "MT5", "UMT5"])
def test_no_matrix_of_position_logits_is_computed(kind):
    length = 128
    original = t5(kind).eval().get_encoder()
    patched = use_retro_kernels(copy.deepcopy(original))
    sizes = []
    for model in (original, patched):
        with Largest() as largest, torch.no_grad():
            sizes.append((largest, model(tokens(1, length)).last_hidden_state))
    assert sizes[0][0].elements >= 2 * length**2 > sizes[1][0].elements
    torch.testing.assert_close(sizes[1][1], sizes[0][1], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["T5", "UMT5"])
def test_another_implementation_gets_the_bias_again(kind):
    original = t5(kind).eval().get_encoder()
    patched = use_retro_kernels(copy.deepcopy(original))
    patched.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert torch.equal(patched(tokens()).last_hidden_state, original(tokens()).last_hidden_state)


def test_the_ops_are_called(monkeypatch):
    from retro_model.integrations import attention

    calls = []
    real = attention.relative_attention
    monkeypatch.setattr(attention, "relative_attention", lambda *a, **kw: calls.append(kw) or real(*a, **kw))
    model = use_retro_kernels(t5().eval())
    result(model, CASES["T5"][1]())
    assert model.config._attn_implementation == NAME
    assert len(calls) == 6 and all("rel_key" in kw for kw in calls)


class Plain(torch.nn.Module):
    """A decoder called without an attention mask and without a cache."""

    def __init__(self, model, **options):
        super().__init__()
        self.model, self.options = model, options

    def forward(self, inputs, positions=None):
        return self.model(inputs, position_ids=positions, use_cache=False, **self.options).logits


class Masked(Plain):
    """The masks that other models compute, over positions of packed rows."""

    def forward(self, inputs, positions=None):
        from transformers.masking_utils import create_causal_mask

        embedded = self.model.get_input_embeddings()(inputs)
        create_causal_mask(self.model.config, embedded, None, None, position_ids=positions, **self.options)
        return embedded


def exported(strict):
    def trace(model, *inputs):
        length = torch.export.Dim("length", min=2, max=64)
        return torch.export.export(
            model, inputs, dynamic_shapes=tuple({1: length} for _ in inputs), strict=strict
        ).module()

    return trace


def compiled(model, *inputs):
    return torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")


def scripted(model, *inputs):
    return torch.jit.trace(model, inputs, check_trace=False)


TRACES = {
    "eager": lambda model, *inputs: model,
    "export": exported(False),
    "strict export": exported(True),
    "compile": compiled,
    "jit": scripted,
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    "name, trace, packed",
    [
        *(("Llama", trace, packed) for trace in ("eager", "export", "jit") for packed in (False, True)),
        *(("Llama", "strict export", True), ("Llama", "compile", False), ("GPT-NeoX", "compile", True)),
    ],
)
@torch.no_grad()
def test_a_decoder_without_a_mask_is_traced(name, trace, packed):
    """Library's masks are wrapped while tracing; packed rows are told by their positions, [B,N] or [1,N]."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    original = CASES[name][0]().eval()
    patched = Plain(use_retro_kernels(copy.deepcopy(original)))
    inputs = (tokens(), torch.cat([torch.arange(n) for n in (9, 3, 11)])[None]) if packed else (tokens(),)
    function = TRACES[trace](patched, *inputs)
    torch.testing.assert_close(function(*inputs), Plain(original)(*inputs), atol=2e-5, rtol=1e-4)
    shorter = tuple(x[:, 4:15] for x in inputs)  # two texts, the first without its beginning
    torch.testing.assert_close(function(*shorter), Plain(original)(*shorter), atol=2e-5, rtol=1e-4)


def even(batch, head, query, key):
    return key % 2 == 0


MASKS = {
    "or": {"or_mask_function": even},
    "and": {"and_mask_function": even},
    "blocks": {"block_sequence_ids": torch.arange(23).expand(2, -1) // 4},
}


@pytest.mark.parametrize(
    "mask, trace, packed",
    [
        *((mask, trace, False) for mask in ("window", *MASKS) for trace in ("eager", "compile")),
        *(("window", "export", False), ("blocks", "export", False), ("blocks", "strict export", False)),
        *((mask, trace, True) for mask in MASKS for trace in ("eager", "export")),
    ],
)
@torch.no_grad()
def test_other_masks_are_refused_while_tracing_too(mask, trace, packed):
    torch._dynamo.reset()
    inputs = (tokens(), torch.arange(23)[None] % 9) if packed else (tokens(),)
    if mask == "window":
        model = Plain(use_retro_kernels(causal("Mistral", num_key_value_heads=1, sliding_window=8).eval()))
    else:
        model = Masked(use_retro_kernels(causal("Llama").eval()), **MASKS[mask])
    with pytest.raises(Exception, match="a sliding window, a custom mask or one of blocks"):
        TRACES[trace](model, *inputs)(*inputs)


@torch.no_grad()
def test_a_model_of_several_modalities_needs_a_mask_while_it_is_compiled():
    """Dynamo does not show whether a mask has blocks."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=32)
    text = transformers.LlamaConfig(**sizes, vocab_size=64, num_key_value_heads=1)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=63)
    original = transformers.LlavaForConditionalGeneration(config).eval()
    patched = use_retro_kernels(copy.deepcopy(original))
    inputs = {"input_ids": tokens() % 60, "use_cache": False}
    want = original(**inputs).logits
    torch.testing.assert_close(patched(**inputs).logits, want, atol=2e-5, rtol=1e-4)
    model = torch.compile(patched, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="attention_mask: expected one while a model of several modalities"):
        model(**inputs)
    got = model(**inputs, attention_mask=torch.ones_like(inputs["input_ids"])).logits
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_what_the_op_cannot_do_is_refused_by_name():
    with pytest.raises(TypeError, match=r"model: expected a transformers\.PreTrainedModel, or .*; got Linear"):
        use_retro_kernels(torch.nn.Linear(2, 2))
    windowed = causal("Mistral", num_hidden_layers=1, num_key_value_heads=1, sliding_window=8)
    with pytest.raises(ValueError, match="sliding window"):
        use_retro_kernels(windowed.eval())(tokens())
    with pytest.raises(ValueError, match=r"cache \(past_key_values .*\): expected a DynamicCache"):
        use_retro_kernels(causal("Llama").eval()).generate(tokens(), max_new_tokens=4, cache_implementation="static")
