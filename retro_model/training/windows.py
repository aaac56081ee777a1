"""The stream of `batches` as a `torch.utils.data.IterableDataset`: for DataLoader workers, the Hugging Face Trainer,
Lightning."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from retro_model.base.checks import RETRIEVED

from .batches import Batch, batches

IGNORED = -100  # the label of a token that does not count


class WindowDataset(IterableDataset):
    """Windows of a store without end, one a row, with the neighbours of their chunks.

        rows = WindowDataset(store, window=2048, batch_size=8, seed=0, neighbours=neighbours, database=database, k=2)
        loader = DataLoader(rows, batch_size=8, num_workers=2, prefetch_factor=4)
        Trainer(RetrofitForCausalLM.from_decoder(decoder), arguments, train_dataset=rows)

    The batches of a DataLoader of the same batch_size are those of `training.batches`, whatever num_workers: worker w
    of W makes each W-th batch. A row is a dict of tensors: input_ids and labels [N] (-100 on padding), neighbours
    [L,K,R] and neighbour_mask [L,K,R] where there are neighbours, neighbour_scores [L,K] where they are asked for.

    To go on exactly where a run has stopped, give `start`: the batches that were taken (`set_start` moves it later).
    The Trainer does so by itself when it resumes, by reading past them; with `ignore_data_skip=True` and `start`
    nothing is read twice.

    Args:
        store, window, seed, neighbours, database, k, scores, starts, start: see `batches`.
        batch_size: the DataLoader's, of each process.
        rank, world_size: this process and their number, where each has a DataLoader of its own (Lightning with
            use_distributed_sampler=False); the Trainer's accelerate deals the rows out itself.

    Raises:
        ValueError: as `batches`, when it is made.
    """

    def __init__(
        self,
        store,
        *,
        window: int,
        batch_size: int,
        seed: int,
        neighbours: np.ndarray | None = None,
        database=None,
        k: int | None = None,
        scores: bool = False,
        starts: np.ndarray | None = None,
        start: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ):
        super().__init__()
        self.store = store
        self.options = {"window": window, "batch_size": batch_size * world_size, "seed": seed, "starts": starts}
        self.options |= {"neighbours": neighbours, "database": database, "k": k, "scores": scores}
        self.options |= {"rank": rank, "world_size": world_size}
        self.set_start(start)

    def set_start(self, start: int) -> None:
        """Iterators made from now on begin after so many batches."""
        batches(self.store, start=start, **self.options)  # checks the arguments; reads nothing
        self.start = start

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for batch in batches(self.store, start=self.start + first, every=every, **self.options):
            yield from rows(batch)


def rows(batch: Batch) -> Iterator[dict[str, Tensor]]:
    """Each window of a batch as a dict: input_ids, labels, and neighbours with their mask."""
    for i, tokens in enumerate(batch.tokens):
        row = {"input_ids": tokens, "labels": torch.where(batch.real[i], tokens, IGNORED)}
        yield row | {name: batch.inputs[name][i] for name in RETRIEVED if name in batch.inputs}


def prefetched(dataset: WindowDataset, workers: int, *, ahead: int = 4) -> Iterator[Batch]:
    """The batches of a dataset, read from its memory maps by worker processes before they are asked for.

        for results in training.train(model, optimizer, prefetched(dataset, 2), settings):
            print(results["waiting"])  # the share of the step that waited for them

    Args:
        dataset: its `batch_size` is a batch's.
        workers: processes, each with a copy of what it reads from (folders are opened again there); 0: read here, when
            asked for.
        ahead: batches that each worker holds ready.
    """
    options = {"prefetch_factor": ahead, "multiprocessing_context": "spawn"} if workers else {}
    size = dataset.options["batch_size"] // dataset.options["world_size"]
    loader = iter(DataLoader(dataset, batch_size=size, num_workers=workers, **options))  # the workers begin now
    return map(_batch, loader)


def _batch(row: dict[str, Tensor]) -> Batch:
    found = {name: row.get(name) for name in RETRIEVED}
    return Batch(row["input_ids"], row["labels"] != IGNORED, **found)
