"""Gradients of the reference's attentions against finite differences."""

import torch


def check(op, kw: dict) -> None:
    """Compare the gradients of out and the finite lse in every differentiable argument of `op(**kw)`."""
    names = [n for n, v in kw.items() if isinstance(v, torch.Tensor) and v.requires_grad]

    def attend(*tensors):
        out, lse = op(**kw | dict(zip(names, tensors, strict=True)), return_lse=True, backend="reference")
        return out, lse.where(lse.isfinite(), 0)

    assert torch.autograd.gradcheck(attend, tuple(kw[n] for n in names), fast_mode=True)
