"""AdaBelief, the optimiser that RPT was trained with."""

from __future__ import annotations

import torch


class AdaBelief(torch.optim.Optimizer):
    """Adam whose divisor is the gradient's deviation from its mean, not its size.

        m = b1 m + (1 - b1) g;   s = b2 s + (1 - b2)(g - m)^2 + eps_root
        p -= lr * (m^ / (sqrt(s^) + eps) + weight_decay p)

    with m^ = m / (1 - b1^t), s^ = s / (1 - b2^t). The divisor is at least sqrt(eps_root / (1 - b2)), 1e-7 by default:
    steps on smaller deviations are proportional to the gradient.

    params: tensors or groups, as of any optimiser of torch.
    lr: learning rate. betas: b1, b2. eps, eps_root: see above. weight_decay: decoupled.
    Source: Zhuang et al., arXiv 2010.07468, algorithm 2; the defaults are those with which RPT was trained.
    """

    def __init__(self, params, lr=5e-3, betas=(0.9, 0.99), eps=1e-16, eps_root=1e-16, weight_decay=0.0):
        if lr < 0 or not all(0 <= b < 1 for b in betas):
            raise ValueError(f"lr, betas: expected lr >= 0 and betas in [0, 1); got {lr}, {betas}")
        options = {"lr": lr, "betas": betas, "eps": eps, "eps_root": eps_root, "weight_decay": weight_decay}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure=None):
        """Update the parameters; return the loss that `closure` recomputes, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["mean"], state["spread"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                t, mean, spread = int(state["step"]), state["mean"], state["spread"]
                mean.lerp_(p.grad, 1 - b1)
                away = p.grad - mean
                spread.mul_(b2).addcmul_(away, away, value=1 - b2).add_(group["eps_root"])
                if group["weight_decay"]:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                divisor = (spread / (1 - b2**t)).sqrt_().add_(group["eps"])
                p.addcdiv_(mean, divisor, value=-group["lr"] / (1 - b1**t))
        return loss
