"""Seeds of dropout, drawn from torch's generators by an operator of their own in compiled graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import private
from ..core.operator import LIBRARY, NAMESPACE


def with_seed(call):
    """Return a call with a seed [1] from the generator of its device, which `torch.manual_seed` sets.

    Compiled graphs contain the operator `dropout_seed`. The memory that it gets is new for each call, so that the
    compiler does not merge the seeds of two calls.
    """
    like = torch.empty(1, dtype=torch.int64, device=call.query.device)
    draw = torch.ops.retro_kernels.dropout_seed if torch.compiler.is_compiling() else _random_seed
    return call._replace(seed=draw(like))


def _random_seed(like: Tensor) -> Tensor:
    return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=like.device)


def _saved_seed(like: Tensor) -> Tensor:
    """Draw a seed that a compiled backward pass reads from memory.

    A graph that recomputes activations would otherwise draw another seed, and so another mask, in its backward pass.
    """
    with private.saved_for_backward("dropout_p"), private.below_autograd():
        return torch.ops.retro_kernels.dropout_seed(like)


LIBRARY.define("dropout_seed(Tensor like) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
for _device in ("CPU", "CUDA"):
    LIBRARY.impl("dropout_seed", _random_seed, _device)
LIBRARY.impl("dropout_seed", _saved_seed, "Autograd")
LIBRARY.impl("dropout_seed", _random_seed, "FuncTorchDynamicLayerFrontMode")  # vmap knows the rules of randint
torch.library.register_fake(
    f"{NAMESPACE}::dropout_seed", lambda like: torch.empty(1, dtype=torch.int64, device=like.device), lib=LIBRARY
)
