"""retro-pytorch's chunked cross-attention against this package's with the same weights: values, gradients, a whole
model.
"""

import importlib.util
import sys
import types

import pytest
import torch

from retro_kernels.testing import assert_passes
from retro_model.integrations.attention import use_retro_kernels
from retro_model.integrations.retro_pytorch import RetroPytorchCCA, swap_retro_pytorch
from tests.refusals import refused

pytest.importorskip("einops")


@pytest.fixture(scope="module")
def package():
    if importlib.util.find_spec("retro_pytorch") is None:
        pytest.skip("needs retro-pytorch")
    stand_in = types.ModuleType("autofaiss")  # the package's index builder, which pins old versions
    stand_in.build_index = None
    sys.modules.setdefault("autofaiss", stand_in)
    return importlib.import_module("retro_pytorch.retro_pytorch")


M, R, K, HEADS, DIM, CONTEXT = 8, 16, 2, 3, 24, 20


def original(package, seed: int = 0):
    torch.manual_seed(seed)
    return package.ChunkedCrossAttention(chunk_size=M, dim=DIM, context_dim=CONTEXT, dim_head=32, heads=HEADS)


def inputs(tokens: int, seed: int = 1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, tokens, DIM, generator=g, dtype=torch.float64)
    context = torch.randn(2, tokens // M, K, R, CONTEXT, generator=g, dtype=torch.float64)
    return x, context, torch.rand(context.shape[:-1], generator=g) > 0.3


def angles(package, on: bool):
    rotary = package.RotaryEmbedding(32)
    pair = rotary(M, device="cpu", offset=M - 1), rotary(R, device="cpu")
    return pair if on else tuple(torch.zeros_like(a) for a in pair)


def outcome(module, x, context, dtype, **options) -> dict:
    """Return the output and the gradients of inputs and parameters."""
    module = module.to(dtype)
    module.zero_grad(set_to_none=True)
    x, context = (t.detach().to(dtype, copy=True).requires_grad_() for t in (x, context))
    out = module(x, context=context, **options)
    out.square().sum().backward()
    results = {"out": out.detach(), "grad_x": x.grad, "grad_context": context.grad}
    return results | {f"grad_{name}": p.grad.clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("tokens", [M, 3 * M, 3 * M + 5, 4 * M - 1])
def test_same_outputs_and_gradients_with_the_same_weights(package, tokens, positions):
    module, (x, context, mask) = original(package), inputs(tokens)
    mask[0, 0] = False  # a chunk without neighbours attends only the null key
    options = {"context_mask": mask, "pos_emb": angles(package, positions)}
    want = outcome(module, x, context, torch.float64, **options)
    eager = outcome(module, x, context, torch.float32, **options)
    got = outcome(RetroPytorchCCA(module), x, context, torch.float32, **options)
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        if want[name].any() or tensor.any():
            assert_passes(name, tensor, want[name], eager[name], torch.float32)


def test_no_positions_is_positions_of_angle_zero(package):
    module, (x, context, _) = RetroPytorchCCA(original(package)), inputs(3 * M)
    module = module.double()
    assert torch.equal(module(x, context=context), module(x, context=context, pos_emb=angles(package, False)))


def test_fewer_tokens_than_a_chunk_attend_nothing(package):
    module, (x, context, _) = RetroPytorchCCA(original(package)).double(), inputs(M - 1)
    assert not module(x, context=context).any()


def test_a_whole_model_swapped(package):
    torch.manual_seed(0)
    encoder, decoder = dict(enc_dim=32, enc_depth=1), dict(dec_dim=32, dec_depth=3, dec_cross_attn_layers=(2, 3))
    model = package.RETRO(
        chunk_size=M, num_tokens=50, max_seq_len=64, heads=2, dim_head=32, **encoder, **decoder
    ).eval()
    tokens, retrieved = torch.randint(1, 50, (2, 4 * M)), torch.randint(1, 50, (2, 4, K, R))
    names = list(model.state_dict())
    eager = model(tokens, retrieved)
    want = model.double()(tokens, retrieved)
    assert use_retro_kernels(model.float()) is model
    assert sum(isinstance(module, RetroPytorchCCA) for module in model.modules()) == 2
    assert list(model.state_dict()) == names
    assert_passes("logits", model(tokens, retrieved), want, eager, torch.float32)


def test_dropout_drops_the_null_key_too(package):
    module = original(package)
    module.cross_attn.dropout.p = 0.5
    x, context, _ = inputs(2 * M)
    nothing = torch.zeros(context.shape[:-1], dtype=torch.bool)
    module = RetroPytorchCCA(module).double()
    torch.nn.init.eye_(module.cross_attn.to_out.weight)
    torch.nn.init.zeros_(module.cross_attn.to_out.bias)
    out = module(x, context=context, context_mask=nothing)[:, M - 1 :]
    null = module.cross_attn.null_v[:DIM]
    kept = out.abs().sum(-1) > 0  # width 24 of the 32 of head 0: one mask value a token
    assert torch.allclose(out[kept], (2 * null).expand_as(out[kept]))
    assert 0 < kept.sum() < kept.numel()


def test_errors_name_the_argument(package):
    module, (x, context, _) = RetroPytorchCCA(original(package)).double(), inputs(3 * M)
    refused(r"context: expected \[B=2,L=3,K,R,F\] for N=24; got", module, x, context=context[:, :2])
    refused("original: expected retro-pytorch's", RetroPytorchCCA, torch.nn.Linear(2, 2), error=TypeError)
    refused("model: expected a retro-pytorch model", swap_retro_pytorch, torch.nn.Linear(2, 2))
