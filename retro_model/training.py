"""Training as in the paper: batches of chunk rows with their neighbours, AdamW, warm-up and cosine, one step.

Plain functions over a plain module: wrap the model in `torch.compile`, DistributedDataParallel or `fully_shard` and pass the
result. Nothing is kept between steps but the model, the optimiser and two counters (step and position), which is what
`retro_model.checkpoint` saves.

    model = Retro(config)
    optimizer = make_optimizer(model, settings)
    stream = batches(store, database=database, neighbours=ids, window=2048, batch_size=16, seed=0)
    for step in range(settings.steps):
        report = train_step(model, optimizer, [next(stream)], settings, step)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

AUTOCAST = (None, "bfloat16", "float16")  # types of matrix products; None: the parameters' own


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters of the optimiser and its schedule. Source: appendix C.1 and Table 10 of arXiv 2112.04426.

    max_lr: learning rate after the warm-up. min_lr_ratio: its floor, as a share of max_lr. warmup_steps: steps of the linear
    ramp from warmup_from. steps: length of the cosine, warm-up included. clip: largest norm of the whole gradient. autocast:
    type of matrix products, None for the parameters' own (the paper trains in bfloat16).
    """

    steps: int
    max_lr: float = 2e-4
    min_lr_ratio: float = 0.1
    warmup_steps: int = 750
    warmup_from: float = 1e-7
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0
    autocast: str | None = None

    def __post_init__(self):
        for name in ("steps", "max_lr", "clip", "eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.warmup_steps <= self.steps:
            raise ValueError(f"warmup_steps must be between 0 and steps ({self.steps}), got {self.warmup_steps}")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"min_lr_ratio must be between 0 and 1, got {self.min_lr_ratio}")
        if self.autocast not in AUTOCAST:
            raise ValueError(f"autocast must be one of {AUTOCAST}, got {self.autocast!r}")

    def to_dict(self) -> dict:
        """What JSON can hold."""
        return asdict(self)


@dataclass(frozen=True)
class Batch:
    """Windows of consecutive chunk rows and what was retrieved for each chunk.

    tokens: int64 [B, N]. real: bool [B, N], False on padding. neighbours: int64 [B, L, K, R] or None. neighbour_mask: bool
    [B, L, K, R] or None.
    """

    tokens: Tensor
    real: Tensor
    neighbours: Tensor | None = None
    neighbour_mask: Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`."""
        move = lambda t: None if t is None else t.to(device, non_blocking=True)  # noqa: E731
        return Batch(move(self.tokens), move(self.real), move(self.neighbours), move(self.neighbour_mask))


def check_neighbours(store, neighbours: np.ndarray | None, database) -> None:
    """ValueError unless neighbours and database come together, with a row for each of the store's chunks."""
    if (neighbours is None) != (database is None):
        raise ValueError("neighbours and database come together: give both, or neither")
    if neighbours is not None and (np.ndim(neighbours) != 2 or len(neighbours) != len(store.lengths)):
        raise ValueError(f"neighbours must be [{len(store.lengths)}, K], one row for each chunk, got {list(np.shape(neighbours))}")


def gather(store, rows: np.ndarray, neighbours: np.ndarray | None = None, database=None) -> Batch:
    """The batch made of chunk rows `rows` (int64 [B, L]; -1 is a row of padding) of `store`.

    neighbours: int64 [num_chunks, K], the database ids retrieved for each chunk of the store (-1: none), with `database`;
    None leaves retrieval off.
    Returns: a Batch with N = L * store.chunk_len.
    """
    rows = np.asarray(rows)
    there, safe = rows >= 0, np.maximum(rows, 0)
    lengths = np.where(there, np.asarray(store.lengths)[safe], 0)
    real = np.arange(store.chunk_len) < lengths[..., None]  # [B, L, M]
    tokens = np.where(real, np.asarray(store.tokens[safe]), 0).astype(np.int64)
    flat = [torch.from_numpy(a.reshape(len(rows), -1)) for a in (tokens, real)]
    if neighbours is None:
        return Batch(*flat)
    ids = np.where(there[..., None], np.asarray(neighbours[safe]), -1)
    values, mask = database.values(ids)
    return Batch(*flat, torch.as_tensor(values), torch.as_tensor(mask))


def batches(store, *, window: int, batch_size: int, seed: int, neighbours: np.ndarray | None = None, database=None,
            starts: np.ndarray | None = None, start: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:  # fmt: skip
    """Batches without end, a pure function of (store, window, batch_size, seed) and the position.

    An epoch cuts the store into windows of `window` tokens from a random first row, and visits them in random order.
    Process `rank` of `world_size` takes its share of each batch, so that the batch as a whole does not depend on them.

    window: tokens, a multiple of the chunk length. batch_size: windows in a batch, over all processes. starts: first rows of the
    windows to draw from, in place of all. start: position (batches already taken) to go on from. neighbours, database: see `gather`.
    Returns: an iterator over Batch.
    Raises: ValueError where the store is smaller than a batch, or sizes do not divide.
    """
    per_window, left = divmod(window, store.chunk_len)
    if window < 1 or left:
        raise ValueError(f"window must be a positive multiple of the chunk length ({store.chunk_len}), got {window}")
    if batch_size < 1 or batch_size % world_size:
        raise ValueError(f"batch_size must be a positive multiple of world_size ({world_size}), got {batch_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to world_size - 1 = {world_size - 1}, got {rank}")
    check_neighbours(store, neighbours, database)
    rows = len(store.lengths)
    if starts is None:
        # One window fewer than fit, so that every epoch may start anywhere in the first window and has the same length.
        firsts, shift = np.arange(max(0, rows // per_window - 1)) * per_window, per_window
    else:
        firsts, shift = np.asarray(starts), 1
        if firsts.ndim != 1 or (len(firsts) and (firsts.min() < 0 or firsts.max() > rows - per_window)):
            raise ValueError(f"starts must be rows from 0 to {rows - per_window}, got shape {list(firsts.shape)}")
    if len(firsts) < batch_size:
        raise ValueError(f"the store's {rows} chunks do not fill a batch of {batch_size} windows of {per_window} chunks, and one more")
    return _stream(store, neighbours, database, per_window, batch_size, firsts, shift, seed, start, rank, world_size)


def _stream(store, neighbours, database, per_window, batch_size, firsts, shift, seed, start, rank, world_size):
    position, epoch, order, first_row, per_epoch = start, -1, None, 0, len(firsts) // batch_size
    while True:
        if position // per_epoch != epoch:
            epoch = position // per_epoch
            random = np.random.default_rng([seed, epoch])
            first_row = int(random.integers(shift))
            order = random.permutation(len(firsts))
        at = position % per_epoch * batch_size
        mine = firsts[order[at : at + batch_size][rank::world_size]]
        yield gather(store, first_row + mine[:, None] + np.arange(per_window), neighbours, database)
        position += 1


def token_losses(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of each token given those before it, in nats, and which of them count.

    logits: [B, N, V]. A window's first token has nothing before it and is left out, as is padding.
    Returns: losses float32 (float64 for such logits) [B, N-1] (zero where they do not count), counted bool [B, N-1].
    """
    counted = batch.real[:, 1:]
    targets = batch.tokens[:, 1:]
    logits = logits[:, :-1].flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()  # a sum of a vocabulary's exponentials in half would be lost
    losses = F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)
    return losses * counted, counted


def loss(logits: Tensor, batch: Batch) -> Tensor:
    """Mean negative log-likelihood over the real tokens of a batch, in nats."""
    losses, counted = token_losses(logits, batch)
    return losses.sum() / counted.sum().clamp(min=1)


def learning_rate(step: int, settings: Settings) -> float:
    """Linear from warmup_from to max_lr over warmup_steps, then a cosine to min_lr_ratio * max_lr at `steps`, then constant."""
    s = settings
    if step < s.warmup_steps:
        return s.warmup_from + (s.max_lr - s.warmup_from) * step / s.warmup_steps
    done = min(1.0, (step - s.warmup_steps) / max(1, s.steps - s.warmup_steps))
    low = s.min_lr_ratio * s.max_lr
    return low + (s.max_lr - low) * 0.5 * (1 + math.cos(math.pi * done))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Parameters with weight decay and those without, each once.

    Decay shrinks the matrices of linear maps, whose scale the next norm or softmax can undo. Gains of norms, biases and u, v
    are few and set scales and offsets themselves: shrinking them to zero is no simpler model. A row of an embedding gets a
    gradient only when its token occurs, so decay at every step would erase rare tokens; an output matrix tied to it goes with it.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} - embeddings
    decayed = [p for p in trainable if id(p) in matrices]
    others = [p for p in trainable if id(p) not in matrices]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """AdamW over `parameter_groups`. Make it after the model is on its device and sharded."""
    groups = [g for g in parameter_groups(model, settings.weight_decay) if g["params"]]
    if not groups:
        raise ValueError("model has no trainable parameters")
    return torch.optim.AdamW(groups, lr=settings.warmup_from, betas=settings.betas, eps=settings.eps, fused=True)


def shard(model: nn.Module, mesh) -> nn.Module:
    """FSDP2 over `mesh`, in place: each layer of decoder and encoder is gathered when it runs, the rest stays gathered.

    The first layer with chunked cross-attention runs in two steps, with the encoder in between; its parts are sharded by
    themselves, because FSDP2 gathers a module only when its `forward` is called.
    """
    from torch.distributed.fsdp import fully_shard

    first = model.config.cca_layers[0] if model.config.cca_layers else 0
    units = [*(model.encoder.layers if model.encoder is not None else ())]
    for index, layer in enumerate(model.layers, 1):
        units += [layer.attention, layer.cca, layer.feed_forward] if index == first else [layer]
    for unit in units:
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _autocast(device: torch.device, settings: Settings):
    if settings.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, settings.autocast))


@contextlib.contextmanager
def _synchronise(model: nn.Module, now: bool):
    """Gradients meet other processes' only in the last backward of a step."""
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(now)
        yield
    elif hasattr(model, "no_sync") and not now:  # DDP
        with model.no_sync():
            yield
    else:
        yield


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, parts: list[Batch], settings: Settings, step: int) -> dict[str, float]:
    """One optimiser step on the mean loss over all real tokens of `parts`, of this and every other process.

    parts: batches whose gradients add up (gradient accumulation). step: 0-based, sets the learning rate.
    Returns: loss in nats a token, gradient norm before clipping, learning rate, number of real tokens.
    Raises: FloatingPointError where the gradient is not finite; the parameters are then as before.
    """
    if not parts:
        raise ValueError("parts must have at least one batch")
    device = next(model.parameters()).device
    rate = learning_rate(step, settings)
    for group in optimizer.param_groups:
        group["lr"] = rate
    parts = [part.to(device) for part in parts]
    processes = dist.get_world_size() if dist.is_initialized() else 1
    totals = torch.stack([torch.zeros((), device=device), sum(p.real[:, 1:].sum() for p in parts).float()])
    if processes > 1:
        dist.all_reduce(totals[1])
    model.train()
    for i, part in enumerate(parts):
        with _synchronise(model, i == len(parts) - 1):
            with _autocast(device, settings):
                logits = model(part.tokens, part.neighbours, neighbour_mask=part.neighbour_mask)
            summed = token_losses(logits, part)[0].sum()
            # DDP and FSDP average over processes; tokens are what counts, so the number of processes is multiplied back.
            (summed * (processes / totals[1].clamp(min=1))).backward()
        totals[0] += summed.detach()
    if processes > 1:
        dist.all_reduce(totals[0])
    norm = nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
    norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if not math.isfinite(norm):
        optimizer.zero_grad(set_to_none=True)
        raise FloatingPointError(f"gradient norm is {norm} at step {step}: loss {float(totals[0] / totals[1])}, learning rate {rate:.3g}")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"loss": float(totals[0] / totals[1].clamp(min=1)), "gradient_norm": norm, "learning_rate": rate, "tokens": int(totals[1])}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, stream: Iterator[Batch], settings: Settings, *, start: int = 0,
          stop: int | None = None, accumulate: int = 1, report: Callable[[int, dict], None] | None = None) -> list[dict]:  # fmt: skip
    """Steps `start` to `stop` (settings.steps by default), `accumulate` batches each; `report(step, results)` after each.

    Returns: the results of `train_step`, one a step.
    """
    if accumulate < 1:
        raise ValueError(f"accumulate must be at least 1, got {accumulate}")
    history = []
    for step in range(start, settings.steps if stop is None else stop):
        history.append(train_step(model, optimizer, [next(stream) for _ in range(accumulate)], settings, step))
        if report is not None:
            report(step, history[-1])
    return history


@contextlib.contextmanager
def progress(title: str, steps: int, quiet: bool = False):
    """A rich progress bar over `steps`; yields a `report` for `train`: loss (smoothed), tokens a second, time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
               TimeElapsedColumn(), TimeRemainingColumn()]  # fmt: skip
    with Progress(*columns, disable=quiet) as bar:
        task = bar.add_task(title, total=steps, note="")
        smooth = None

        def report(step: int, results: dict) -> None:
            nonlocal smooth
            smooth = results["loss"] if smooth is None else 0.95 * smooth + 0.05 * results["loss"]
            speed = bar.tasks[task].speed
            bar.update(task, advance=1, note=f"loss {smooth:.3f}" + (f", {speed * results['tokens']:,.0f} tokens/s" if speed else ""))

        yield report
