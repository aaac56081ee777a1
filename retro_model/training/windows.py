"""The stream of `batches` as an `IterableDataset` for DataLoader workers, the Hugging Face Trainer and Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from retro_model.base.checks import RETRIEVED

from .batches import Batch, batches

if TYPE_CHECKING:
    from retro_model.data.database import ChunkDatabase

IGNORED = -100  # the label of a token that does not count
AHEAD = 4  # batches that each worker holds ready


class WindowDataset(IterableDataset):
    """Endless windows of a store with the neighbours of their chunks; a row is a window.

        rows = WindowDataset(store, window=2048, batch_size=8, seed=0, neighbours=neighbours, database=database, k=2)
        loader = DataLoader(rows, batch_size=8, num_workers=2, prefetch_factor=4)
        Trainer(RetrofitForCausalLM.from_decoder(decoder), arguments, train_dataset=rows)

    A DataLoader of the same batch_size gives the batches of `training.batches`, for any num_workers: worker w of W
    makes each W-th batch. A row is a dict of tensors: input_ids and labels [N] (-100 on padding); with neighbours also
    neighbours and neighbour_mask [L,K,R].

    To resume a run exactly, pass the number of batches taken as `start`, or call `set_start`. The Trainer resumes by
    reading past them; with `ignore_data_skip=True` and `start` it reads nothing twice.

    Args:
        store, window, seed, neighbours, database, k, starts, start: see `batches`.
        batch_size: the DataLoader's, of each process.
        rank, world_size: this process and their number, if each has a DataLoader of its own (Lightning with
            use_distributed_sampler=False). The Trainer distributes the rows itself.

    Raises: ValueError: as `batches`.
    """

    def __init__(
        self,
        store,
        *,
        window: int,
        batch_size: int,
        seed: int,
        neighbours: np.ndarray | None = None,
        database: ChunkDatabase | None = None,
        k: int | None = None,
        starts: np.ndarray | None = None,
        start: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ):
        super().__init__()
        self.store = store
        self.options = {"window": window, "batch_size": batch_size * world_size, "seed": seed, "starts": starts}
        self.options |= {"neighbours": neighbours, "database": database, "k": k}
        self.options |= {"rank": rank, "world_size": world_size}
        self.set_start(start)

    def set_start(self, start: int) -> None:
        """Make later iterators begin after `start` batches."""
        batches(self.store, start=start, **self.options)  # checks the arguments; reads nothing
        self.start = start

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for batch in batches(self.store, start=self.start + first, every=every, **self.options):
            retrieved = {name: tensor for name, tensor in batch.inputs.items() if name in RETRIEVED}
            for i, tokens in enumerate(batch.tokens):
                row = {"input_ids": tokens, "labels": torch.where(batch.real[i], tokens, IGNORED)}
                yield row | {name: tensor[i] for name, tensor in retrieved.items()}


def prefetched(dataset: WindowDataset, workers: int) -> Iterator[Batch]:
    """Iterate over a dataset's batches, which worker processes read ahead.

        for results in training.train(model, optimizer, prefetched(dataset, 2), settings):
            print(results["waiting"])  # share of the step that waited for its batch

    Args:
        dataset: its `batch_size` is the batches'.
        workers: number of processes; each opens the dataset's folders again. 0: read in this process, on demand.
    """
    options = {"prefetch_factor": AHEAD, "multiprocessing_context": "spawn"} if workers else {}
    size = dataset.options["batch_size"] // dataset.options["world_size"]
    loader = iter(DataLoader(dataset, batch_size=size, num_workers=workers, **options))  # the workers begin now
    return (Batch(row.pop("input_ids"), row.pop("labels") != IGNORED, **row) for row in loader)
