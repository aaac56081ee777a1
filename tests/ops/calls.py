"""Calls of an op by name: its outputs, its floating arguments, and a mode under which no memo serves it."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import retro_kernels as rk
from retro_kernels.core.arguments import CALLS
from retro_kernels.testing import inputs

BUILDERS = {
    "chunked_cross_attention": inputs.cross_attention,
    "relative_attention": inputs.self_attention,
    "relative_logits": inputs.relative_logits,
    "topk_chunks": inputs.topk,
    "leaky_average": inputs.leaky,
    "merge_attention": inputs.merged,
    "rms_norm": inputs.rms,
    "cross_entropy": inputs.entropy,
}


class Listener(TorchDispatchMode):
    """Under a mode a call uses the registered operator, which depends on no earlier call."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return operator(*args, **(kwargs or {}))


def outputs(op: str, kw: dict, backend: str | None = None, lse: bool = False) -> tuple[torch.Tensor, ...]:
    """Return the outputs. lse: an attention also returns its log-sum-exp."""
    more = {"return_lse": True} if lse and op in ("chunked_cross_attention", "relative_attention") else {}
    outs = getattr(rk, op)(**kw, **more, backend=backend)
    return outs if isinstance(outs, tuple) else (outs,)


def resolved(op: str, kw: dict):
    """Return the arguments of the raw operator."""
    call_type = CALLS[op]
    defaults = {"causal": False, "dropout_p": 0.0, "query_start": 0, "metric": "dot"}
    defaults |= {"query_offset": 0} if op in ("topk_chunks", "relative_logits") else {"causal_gap": 0}
    given = defaults | call_type._field_defaults | kw
    return call_type(**{name: given.get(name) for name in call_type._fields}).checked()


def floats(kw: dict) -> list[str]:
    """Return the names of the floating tensors."""
    return [n for n, v in kw.items() if isinstance(v, torch.Tensor) and v.is_floating_point()]


def leaves(kw: dict) -> dict[str, torch.Tensor]:
    """Return the tensors that want a gradient."""
    return {n: v for n, v in kw.items() if isinstance(v, torch.Tensor) and v.requires_grad}
