"""`layers.RMSNorm` equals torch's module and uses the op."""

import pytest
import torch

from retro_kernels.ops import rms_norm
from retro_model import layers


def test_it_is_torchs_module():
    ours, theirs = layers.RMSNorm(128), torch.nn.RMSNorm(128)
    assert isinstance(ours, type(theirs)) and list(ours.state_dict()) == list(theirs.state_dict())
    assert torch.equal(ours.weight, theirs.weight) and repr(ours) == repr(theirs)
    x = torch.randn(4, 256, 128)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), theirs(x), rtol=1e-5, atol=1e-5)


def test_norms_that_only_torch_serves(monkeypatch):
    monkeypatch.setattr(rms_norm, "RMSNorm", None)
    x = torch.randn(100, 384)
    assert layers.RMSNorm((4, 96), eps=1e-6)(x.view(100, 4, 96)).shape == (100, 4, 96)
    assert layers.RMSNorm(384, elementwise_affine=False)(x).shape == x.shape


def test_a_module_of_another_width_says_so():
    with pytest.raises(ValueError, match=r"input: expected \[\.\.\.,D\] with D=96; got \[100, 384\]"):
        layers.RMSNorm(96)(torch.randn(100, 384))
