"""The loss of a batch, one optimiser step, many of them, and a model sharded over processes."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from retro_model.layers import NextTokenLoss

from . import memory
from .batches import Batch
from .optimiser import Settings, learning_rate


def token_losses(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of each token given those before it, in nats, and which of them count.

    logits: [B, N, V]. A window's first token has nothing before it and is left out, as is padding.
    Returns: losses float32 (float64 for such logits) [B, N-1] (zero where they do not count), counted bool [B, N-1].
    """
    counted = batch.real[:, 1:]
    targets = batch.tokens[:, 1:]
    logits = logits[:, :-1].flatten(0, 1)
    # a sum of a vocabulary's exponentials in half would be lost
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)
    return losses * counted, counted


def loss(logits: Tensor, batch: Batch) -> Tensor:
    """Mean negative log-likelihood over the real tokens of a batch, in nats."""
    losses, counted = token_losses(logits, batch)
    return losses.sum() / counted.sum().clamp(min=1)


def batch_loss(model: nn.Module, batch: Batch) -> tuple[NextTokenLoss, int]:
    """The loss over the real tokens of a batch, and the size of the vocabulary; all logits are made only for a model
    that does not take `loss_mask` (its class says so: `sums_losses`)."""
    plain = model
    while not hasattr(plain, "sums_losses") and hasattr(plain, "module"):  # DistributedDataParallel
        plain = plain.module
    if getattr(plain, "sums_losses", False):
        return model(**batch.inputs, loss_mask=batch.real), plain.config.vocab_size
    logits = model(**batch.inputs)
    losses = token_losses(logits, batch)[0]
    return NextTokenLoss(losses.sum(), losses.detach()), logits.shape[-1]


def shard(model: nn.Module, mesh) -> nn.Module:
    """FSDP2 over `mesh`, in place: each of the model's `shard_units()` is gathered when it runs, the rest stays
    gathered."""
    from torch.distributed.fsdp import fully_shard

    for unit in model.shard_units():
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _autocast(device: torch.device, settings: Settings):
    if settings.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, settings.autocast))


@contextlib.contextmanager
def _synchronise(model: nn.Module, now: bool):
    """Reduce gradients over processes only in the last backward pass of a step."""
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(now)
        yield
    elif hasattr(model, "no_sync") and not now:  # DDP
        with model.no_sync():
            yield
    else:
        yield


def clipped_step(model: nn.Module, optimizer: torch.optim.Optimizer, largest: float) -> Tensor:
    """The optimiser's step on gradients scaled so that their norm is at most `largest`; returns the norm before.

    Where the norm is not finite the parameters stay as they were. A fused optimiser on one GPU scales and skips by
    itself, and the host does not wait; elsewhere the host looks at the norm first.
    """
    kinds, whole = gradient_norm(model)
    if whole.device.type != "cpu" and list(kinds) == [None] and all(g.get("fused") for g in optimizer.param_groups):
        optimizer.grad_scale = (whole / largest).clamp(min=1.0)  # gradients are divided by it
        optimizer.found_inf = (~whole.isfinite()).float()
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        return whole
    if not whole.isfinite():
        return whole
    if whole > largest:  # a product by 1 would read and write every gradient
        for kind in kinds.values():
            nn.utils.clip_grads_with_norm_(kind, largest, whole)
    optimizer.step()
    return whole


def gradient_norm(model: nn.Module) -> tuple[dict, Tensor]:
    """The parameters that have gradients by mesh, and the norm of all gradients."""
    kinds: dict = {}
    for p in model.parameters():
        if p.grad is not None:
            kinds.setdefault(getattr(p, "device_mesh", None), []).append(p)
    norms = [nn.utils.get_total_norm([p.grad for p in kind]) for kind in kinds.values()]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    whole = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]
    return kinds, whole


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, parts: list[Batch], settings: Settings, step: int
) -> dict[str, float]:
    """One optimiser step on the mean loss over all real tokens of `parts`, of this and every other process.

    parts: batches whose gradients add up (gradient accumulation). step: 0-based, sets the learning rate.
    Returns: loss in nats a token, gradient norm before clipping, learning rate, number of real tokens (once, where
    `parallel.parallelize` has several processes read the same).
    Raises: FloatingPointError where the gradient is not finite; the parameters are then as before.
    """
    if not parts:
        raise ValueError("parts: expected at least one batch; got none")
    device = next(model.parameters()).device
    rate = learning_rate(step, settings)
    for group in optimizer.param_groups:
        group["lr"] = rate
    parts = [part.to(device) for part in parts]
    processes = dist.get_world_size() if dist.is_initialized() else 1
    total, counted = torch.zeros((), device=device), sum(p.counted.sum() for p in parts)
    if processes > 1:
        dist.all_reduce(counted)
    model.train()
    for i, part in enumerate(parts):
        with _synchronise(model, i == len(parts) - 1):
            with _autocast(device, settings):
                summed = batch_loss(model, part)[0].total
            # DDP and FSDP average over processes; tokens are what
            # counts, so the number of processes is multiplied back.
            (summed * (processes / counted.clamp(min=1))).backward()
        total += summed.detach()
    if processes > 1:
        dist.all_reduce(total)
    norm = clipped_step(model, optimizer, settings.clip)
    optimizer.zero_grad(set_to_none=True)
    # the one time that the host waits, when all of the step is under way; counts of tokens are exact in float64
    loss, norm, tokens = torch.stack([x.double() for x in (total / counted.clamp(min=1), norm, counted)]).tolist()
    if not math.isfinite(norm):
        raise FloatingPointError(f"gradient norm is {norm} at step {step}: loss {loss}, learning rate {rate:.3g}")
    # of the processes that share the heads, all read the same tokens
    readers = max(getattr(module, "divided_among", 1) for module in model.modules())
    return {"loss": loss, "gradient_norm": norm, "learning_rate": rate, "tokens": int(tokens) // readers}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stream: Iterator[Batch],
    settings: Settings,
    *,
    start: int = 0,
    stop: int | None = None,
    accumulate: int = 1,
    report: Callable[[int, dict], None] | None = None,
    keep_memory: bool = False,
) -> list[dict]:
    """Steps `start` to `stop` (settings.steps by default), `accumulate` batches each; `report(step, results)` after
    each. keep_memory: on a CPU the process keeps the memory that its steps free, see `training.keep_memory`.

    Returns: the results of `train_step`, one a step, with the `seconds` it took and `waiting`, the share of them that
    it waited for the stream (`prefetched` reads ahead).
    """
    if accumulate < 1:
        raise ValueError(f"accumulate: expected at least 1; got {accumulate}")
    if keep_memory and next(model.parameters()).device.type == "cpu":
        memory.keep_memory()
    history = []
    for step in range(start, settings.steps if stop is None else stop):
        began = time.perf_counter()
        parts = [next(stream) for _ in range(accumulate)]
        waited = time.perf_counter() - began
        results = train_step(model, optimizer, parts, settings, step)
        seconds = time.perf_counter() - began  # its numbers are read from the device: it has ended there too
        history.append(results | {"seconds": seconds, "waiting": waited / seconds})
        if report is not None:
            report(step, history[-1])
    return history
