"""Training as in the paper: batches of chunk rows with their neighbours, AdamW, warm-up and cosine, one step.

Plain functions over a plain module: wrap the model in `torch.compile`, DistributedDataParallel or `fully_shard` and
pass the result. Nothing is kept between steps but the model, the optimiser and two counters (step and position), which
is what `checkpoint` saves.

    model = Retro(config)
    optimizer = make_optimizer(model, settings)
    stream = batches(store, database=database, neighbours=ids, window=2048, batch_size=16, seed=0)
    for step in range(settings.steps):
        report = train_step(model, optimizer, [next(stream)], settings, step)

    optimiser.py   settings, AdamW, the schedule
    batches.py     chunk rows and their neighbours, a stream without end
    windows.py     the same as a dataset for DataLoader, Trainer, Lightning
    memory.py      memory that steps free, kept for the next
    step.py        losses, one step, many steps; sharding
    rpt.py         the losses, schedules and step of RPT; adabelief.py its optimiser
    checkpoint.py  saves and resumes exactly; checkpoint_folder.py: a kill leaves the old or the new;
                   sharded_checkpoint.py: no process holds the whole
"""

from retro_model.base.progress import training as progress

from . import checkpoint, sharded_checkpoint
from .batches import Batch, batches, check_neighbours, gather, visible
from .memory import keep_memory
from .optimiser import AUTOCAST, TABLE_10, Settings, learning_rate, make_optimizer, parameter_groups
from .step import batch_loss, loss, shard, token_losses, train, train_step
from .windows import WindowDataset, prefetched

__all__ = [
    "AUTOCAST",
    "TABLE_10",
    "Batch",
    "Settings",
    "WindowDataset",
    "batch_loss",
    "batches",
    "check_neighbours",
    "checkpoint",
    "gather",
    "keep_memory",
    "learning_rate",
    "loss",
    "make_optimizer",
    "parameter_groups",
    "prefetched",
    "progress",
    "shard",
    "sharded_checkpoint",
    "token_losses",
    "train",
    "train_step",
    "visible",
]
