"""Megatron's chunked cross-attention against this package's with the same weights, and `use_retro_kernels` on both."""

import contextlib
import importlib.util
import sys
import types

import pytest
import torch
from torch import nn

from retro_kernels.testing import assert_passes
from retro_model.integrations.attention import use_retro_kernels
from retro_model.integrations.megatron import MegatronCCA, swap_megatron
from tests.refusals import refused

M, K, R, L, B, WIDTH, HEADS = 4, 2, 8, 3, 2, 64, 2


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    """Megatron in one process without a GPU: its random numbers and scratch memory are CUDA's, so they are replaced."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        pytest.skip("needs megatron-core 0.12 to 0.14")
    import torch.distributed as dist

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        store = dist.FileStore(str(tmp_path_factory.mktemp("megatron") / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.models.retro import config, decoder_attention

        parallel_state.initialize_model_parallel()
        stack.callback(parallel_state.destroy_model_parallel)
        patch.setattr(config, "is_te_min_version", lambda version: False)
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        tracker = types.SimpleNamespace(fork=contextlib.nullcontext)
        patch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
        yield types.SimpleNamespace(config=config, attention=decoder_attention)


def layer(megatron, **changes):
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import CrossAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    sizes = dict(num_layers=2, hidden_size=WIDTH, num_attention_heads=HEADS, use_cpu_initialization=True)
    retro = dict(retro_chunk_length=M, retro_num_neighbors=K, retro_split_preprocessing="98,2,0")
    config = megatron.config.RetroConfig(**sizes, **retro, **dict(attention_dropout=0.0) | changes)
    parts = CrossAttentionSubmodules(ColumnParallelLinear, ColumnParallelLinear, DotProductAttention, RowParallelLinear)
    torch.manual_seed(0)
    made = megatron.attention.RetroDecoderCrossAttention(config, parts, layer_number=2)
    for parameter in made.parameters():  # Megatron draws weights so small that softmax is uniform
        nn.init.normal_(parameter, std=0.3)
    return made


def outcome(module, dtype, tokens):
    """Return the output and the gradients of inputs and parameters."""
    module = module.to(dtype)
    module.zero_grad(set_to_none=True)
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, B, WIDTH, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    context = torch.randn(R * K, B * L, WIDTH, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    out = module(hidden, None, context)["attention_output"]
    weight = torch.randn(out.shape, generator=g, dtype=torch.float64).to(dtype)
    (out * weight).sum().backward()
    results = {"out": out.detach(), "grad_hidden": hidden.grad, "grad_context": context.grad}
    return results | {f"grad_{name}": p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tokens", [L * M, L * M - 1, L * M - 3])
@pytest.mark.parametrize("scaling", [False, True], ids=["", "scaled by layer"])
def test_same_outputs_and_gradients_with_the_same_weights(megatron, tokens, scaling):
    module = layer(megatron, apply_query_key_layer_scaling=scaling)
    want, eager = outcome(module, torch.float64, tokens), outcome(module, torch.float32, tokens)
    names = list(module.state_dict())
    assert swap_megatron(module) == 1 and isinstance(module.attn.core_attention, MegatronCCA)
    assert list(module.state_dict()) == names
    got = outcome(module, torch.float32, tokens)
    assert got.keys() == want.keys() and len(got) >= 7
    for name, tensor in got.items():
        assert_passes(name, tensor, want[name], eager[name], torch.float32)


def test_dropout_is_off_in_evaluation_and_seeded_in_training(megatron):
    module = layer(megatron, attention_dropout=0.5)
    swap_megatron(module)
    same = [outcome(module.eval(), torch.float32, L * M)["out"] for _ in range(2)]
    assert torch.equal(*same)
    torch.manual_seed(5)
    first = outcome(module.train(), torch.float32, L * M)["out"]
    torch.manual_seed(5)
    assert torch.equal(first, outcome(module, torch.float32, L * M)["out"]) and not torch.equal(first, same[0])


def stand_in(module_name, name="RetroDecoderCrossAttention"):
    """Return a model with a class of the names that the patches look for."""
    attention = type(name, (nn.Module,), {"__module__": module_name})()
    attention.attn = nn.Module()
    attention.attn.core_attention, attention.attn.config = nn.Module(), types.SimpleNamespace(attention_dropout=0.0)
    return nn.Sequential(attention)


def test_the_core_attends_the_neighbours_of_each_chunk():
    core = MegatronCCA(nn.Module(), types.SimpleNamespace(attention_dropout=0.0))
    query, key, value = torch.randn(M, 6, 2, 16), torch.randn(16, 6, 2, 16), torch.randn(16, 6, 2, 16)
    moved = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    want = nn.functional.scaled_dot_product_attention(*moved).permute(2, 0, 1, 3).flatten(2)
    torch.testing.assert_close(core(query, key, value, None, attn_mask_type=1, attention_bias=None), want)
    with pytest.raises(ValueError, match=r"^attention_mask: expected None in RETRO's cross-attention; got a Tensor$"):
        core(query, key, value, torch.ones(1))


def test_one_line_serves_models_of_either_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # the patches do not need it
    model = stand_in("megatron.core.models.retro.decoder_attention")
    assert use_retro_kernels(model) is model and isinstance(model[0].attn.core_attention, MegatronCCA)


def test_other_models_are_refused_by_name():
    refused(r"model: expected a RETRO of Megatron-LM .*; got Linear without any", swap_megatron, nn.Linear(2, 2))
    core = stand_in("megatron.core.models.retro.decoder_attention")[0].attn
    core.config.softmax_type = "learnable"
    refused(r"model: expected .* no parameters; got softmax 'learnable'", MegatronCCA, core.core_attention, core.config)
