"""The loss of a batch, one optimiser step, many of them, and a model sharded over processes."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from retro_model.base import checks
from retro_model.layers import NextTokenLoss

from . import processes
from .batches import Batch
from .optimiser import Settings, by_mesh, learning_rate


class Predicts(Protocol):
    """A model that `train` trains and `evaluation.score` scores: an `nn.Module` with this `forward`.

    A model that is given no neighbours need not have the arguments for them. `segment`, of packed batches, is passed
    only if the batches have it.
    """

    def forward(self, tokens: Tensor, neighbours: Tensor | None = None, neighbour_mask: Tensor | None = None) -> Tensor:
        """Return logits [B,N,V] after each of tokens int64 [B,N], with neighbours int64 [B,L,K,R] of their L complete
        chunks and their mask, bool [B,L,K,R].
        """
        ...


def token_losses(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihood of each token given the tokens before it, in nats, and which tokens count.

    logits: [B, N, V]. Padding does not count, nor does the first token of a window.
    Returns: losses float32 (float64 for such logits) [B, N-1], zero where they do not count; counted bool [B, N-1].
    """
    counted, targets, logits = batch.real[:, 1:], batch.tokens[:, 1:], logits[:, :-1].flatten(0, 1)
    # half precision would lose the sum of a vocabulary's exponentials
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)
    return losses * counted, counted


def loss(logits: Tensor, batch: Batch) -> Tensor:
    """Return the mean negative log-likelihood of the real tokens of a batch, in nats."""
    losses, counted = token_losses(logits, batch)
    return losses.sum() / counted.sum().clamp(min=1)


def batch_loss(model: nn.Module, batch: Batch) -> tuple[NextTokenLoss, int]:
    """Return the loss over the real tokens of a batch, and the size of the vocabulary.

    A model with a true `sums_losses` takes `loss_mask` and computes the loss itself; others have all logits in memory.
    Raises: TypeError if the model is not as in `Predicts`.
    """
    plain = model
    while not hasattr(plain, "sums_losses") and hasattr(plain, "module"):  # DistributedDataParallel
        plain = plain.module
    if getattr(plain, "sums_losses", False):
        return model(**batch.inputs, loss_mask=batch.real), plain.config.vocab_size
    inputs = batch.inputs
    plain = getattr(plain, "_orig_mod", plain)  # torch.compile
    checks.takes(getattr(plain, "forward", plain), inputs, f"forward({', '.join(inputs)}) -> logits (`Predicts`)")
    logits = model(**inputs)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != batch.tokens.shape:
        wanted = f"forward to return logits [B,N,V] with B,N = {list(batch.tokens.shape)} (`Predicts`)"
        got = f"shape {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"model: expected {wanted}; got {got} from {type(plain).__name__}")
    losses = token_losses(logits, batch)[0]
    return NextTokenLoss(losses.sum(), losses.detach()), logits.shape[-1]


def shard(model: nn.Module, mesh) -> nn.Module:
    """Shard a model in place by FSDP2 over `mesh`. Each of its `shard_units()` is gathered when it runs."""
    from torch.distributed.fsdp import fully_shard

    for unit in model.shard_units():
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def autocast(device: torch.device, settings: Settings):
    """Context manager: products have the type `settings.autocast`."""
    if settings.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, settings.autocast))


@contextlib.contextmanager
def _synchronise(model: nn.Module, now: bool):
    """Context manager: backward passes reduce gradients over processes if `now`."""
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(now)
        yield
    elif hasattr(model, "no_sync") and not now:  # DDP
        with model.no_sync():
            yield
    else:
        yield


def clipped_step(model: nn.Module, optimizer: torch.optim.Optimizer, largest: float) -> Tensor:
    """Scale the gradients to a norm of at most `largest` and step; return the norm before.

    The step is skipped if the norm is not finite. A fused optimiser on one GPU scales and skips on the device, so that
    the host does not wait. Any other optimiser lets the host wait for the norm.
    """
    kinds = by_mesh(p for p in model.parameters() if p.grad is not None)
    norms = [nn.utils.get_total_norm([p.grad for p in kind]) for kind in kinds.values()]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    whole = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]
    if whole.device.type != "cpu" and list(kinds) == [None] and all(g.get("fused") for g in optimizer.param_groups):
        optimizer.grad_scale = (whole / largest).clamp(min=1.0)  # gradients are divided by it
        optimizer.found_inf = (~whole.isfinite()).float()
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        return whole
    if not whole.isfinite():
        return whole
    if whole > largest:  # clipping by a factor of 1 would read and write every gradient
        for kind in kinds.values():
            nn.utils.clip_grads_with_norm_(kind, largest, whole)
    optimizer.step()
    return whole


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, parts: list[Batch], settings: Settings, step: int
) -> dict[str, float]:
    """Take one optimiser step on the mean loss over all real tokens of `parts`, of all processes.

    parts: batches whose gradients add up (gradient accumulation). step: from 0, sets the learning rate.
    Returns: loss in nats a token, gradient_norm before clipping, learning_rate and the number of real tokens. Tokens
    that several processes read, under `parallel.parallelize`, count once.
    Raises: FloatingPointError if the gradient is not finite. The parameters are unchanged then.
    """
    if not parts:
        raise ValueError("parts: expected at least one batch; got none")
    device = next(model.parameters()).device
    rate = learning_rate(step, settings)
    for group in optimizer.param_groups:
        group["lr"] = rate
    parts = [part.to(device) for part in parts]
    number = processes.count()
    total, counted = torch.zeros((), device=device), sum(p.counted.sum() for p in parts)
    if number > 1:
        dist.all_reduce(counted)
    model.train()
    for i, part in enumerate(parts):
        with _synchronise(model, i == len(parts) - 1):
            with autocast(device, settings):
                summed = batch_loss(model, part)[0].total
            # DDP and FSDP average gradients over processes; the loss is a mean over tokens instead
            (summed * (number / counted.clamp(min=1))).backward()
        total += summed.detach()
    if number > 1:
        dist.all_reduce(total)
    norm = clipped_step(model, optimizer, settings.clip)
    optimizer.zero_grad(set_to_none=True)
    # the only wait of the host, after the whole step is launched; float64 holds counts of tokens exactly
    loss, norm, tokens = torch.stack([x.double() for x in (total / counted.clamp(min=1), norm, counted)]).tolist()
    if not math.isfinite(norm):
        raise FloatingPointError(f"gradient norm is {norm} at step {step}: loss {loss}, learning rate {rate:.3g}")
    # processes that divide the heads among them read the same tokens
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
) -> list[dict]:
    """Take the steps from `start` to `stop` (None: settings.steps), each on `accumulate` batches of the stream.

    report: called with step and results after each step.
    Returns: for each step the results of `train_step`, `seconds`, and `waiting`, the stream's share of them.
    """
    checks.integer("accumulate", accumulate, low=1)
    history, stream = [], iter(stream)
    for step in range(start, settings.steps if stop is None else stop):
        began = time.perf_counter()
        parts = list(itertools.islice(stream, accumulate))
        if len(parts) < accumulate:
            raise ValueError(f"stream: expected {accumulate} batches for step {step}; it ended after {len(parts)}")
        waited = time.perf_counter() - began
        results = train_step(model, optimizer, parts, settings, step)
        seconds = time.perf_counter() - began  # train_step has read its results from the device: it has ended there
        history.append(results | {"seconds": seconds, "waiting": waited / seconds})
        if report is not None:
            report(step, history[-1])
    return history
