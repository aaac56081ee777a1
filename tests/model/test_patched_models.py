"""Published models through the ops: outputs and gradients of the original."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

from retro_model.integrations.attention import NAME, use_retro_kernels  # noqa: E402


def t5(kind="T5"):
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    config.relative_attention_num_buckets, config.relative_attention_max_distance = 8, 16
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def causal(kind, **more):
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2) | more
    if kind == "Llama":
        sizes |= dict(num_key_value_heads=1)
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))


def conformer():
    config = transformers.Wav2Vec2ConformerConfig(
        vocab_size=8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        position_embeddings_type="relative",
        conv_depthwise_kernel_size=3,
        apply_spec_augment=False,
        layerdrop=0.0,
        **{name: 0.0 for name in ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout")},
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


def test_what_the_op_cannot_do_is_refused_by_name():
    with pytest.raises(TypeError, match=r"model: expected a transformers\.PreTrainedModel, or .*; got Linear"):
        use_retro_kernels(torch.nn.Linear(2, 2))
    windowed = causal("Mistral", num_hidden_layers=1, num_key_value_heads=1, sliding_window=8)
    with pytest.raises(ValueError, match="sliding window"):
        use_retro_kernels(windowed.eval())(tokens())
    with pytest.raises(ValueError, match=r"cache \(past_key_values .*\): expected a DynamicCache"):
        use_retro_kernels(causal("Llama").eval()).generate(tokens(), max_new_tokens=4, cache_implementation="static")
