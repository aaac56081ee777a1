"""Training as in the paper: batches of chunk rows with their neighbours, AdamW, warm-up and cosine, one step.

The functions take any module: the model itself, or the model in `torch.compile`, DistributedDataParallel or
`fully_shard`. The state of a training is the model, the optimiser, the step and the position; `checkpoint` saves them.

    model = Retro(config)
    optimizer = make_optimizer(model, settings)
    stream = batches(store, database=database, neighbours=ids, window=2048, batch_size=16, seed=0)
    for step in range(settings.steps):
        report = train_step(model, optimizer, [next(stream)], settings, step)

    optimiser.py   settings, AdamW, the schedule
    batches.py     chunk rows and their neighbours, an endless stream
    windows.py     the stream as a dataset for DataLoader, Trainer, Lightning
    processes.py   rank, number of processes, objects sent between them
    step.py        losses, one step, many steps; sharding
    rpt.py         the losses, schedules and step of RPT; adabelief.py: its optimiser
    checkpoint.py  saves and resumes exactly, with any number of processes
"""

from retro_model.base.progress import training as progress

from . import checkpoint
from .batches import Batch, batches, check_neighbours, gather, visible
from .optimiser import AUTOCAST, TABLE_10, Settings, learning_rate, make_optimizer, parameter_groups
from .step import Predicts, batch_loss, loss, shard, token_losses, train, train_step
from .windows import WindowDataset, prefetched

__all__ = ["AUTOCAST", "TABLE_10", "Batch", "Predicts", "Settings", "WindowDataset", "batch_loss", "batches"]
__all__ += ["check_neighbours", "checkpoint", "gather", "learning_rate", "loss", "make_optimizer", "parameter_groups"]
__all__ += ["prefetched", "progress", "shard", "token_losses", "train", "train_step", "visible"]
