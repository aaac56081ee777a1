"""Train a RETRO with many processes on the output of `retro-model neighbours OUT --shards N`.

    torchrun --standalone --nproc-per-node 8 examples/train_many.py OUT --preset 172m --sequence 2 --tensor 2

The processes form a mesh data x sequence x tensor: FSDP2 over the first two, ranges of each sequence over the second,
heads over the third. Worker processes prefetch the windows from memory maps.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist

from retro_model import Retro, RetroConfig, training
from retro_model.data.database import ChunkDatabase
from retro_model.data.embed import HashedTfidf
from retro_model.data.neighbours import open_neighbours
from retro_model.data.shards import open_store
from retro_model.parallel import SequencePart, parallelize
from retro_model.training import Settings, WindowDataset, checkpoint


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Train a RETRO with many processes.")
    made.add_argument("out", type=Path, help="folder of `retro-model neighbours`; the checkpoint goes there too")
    made.add_argument("--index", help="the same as for `retro-model neighbours`")
    made.add_argument("--nprobe", type=int, default=16, help="the same as for `retro-model neighbours`")
    made.add_argument("--preset", help="model of the paper's Table 2; default: a tiny model")
    made.add_argument("--steps", type=int, default=20)
    made.add_argument("--window", type=int, default=256, help="tokens a sequence")
    made.add_argument("--batch", type=int, default=4, help="sequences a step, over all processes")
    made.add_argument("-k", type=int, default=2, help="neighbours per chunk")
    made.add_argument("--sequence", type=int, default=1, help="processes that share a sequence")
    made.add_argument("--tensor", type=int, default=1, help="processes that share the heads")
    made.add_argument("--save-every", type=int, default=0, help="steps between two checkpoints; 0: one at the end")
    made.add_argument("--workers", type=int, default=1, help="prefetching workers of each process; 0: none")
    return made


def make_mesh(options: argparse.Namespace):
    """Return this process's device and the mesh of all processes."""
    gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo")
    data, left = divmod(dist.get_world_size(), options.sequence * options.tensor)
    if left or options.batch % data:
        raise SystemExit("--sequence x --tensor must divide the number of processes, and their quotient --batch")
    shape, names = (data, options.sequence, options.tensor), ("data", "sequence", "tensor")
    return device, dist.init_device_mesh(device.type, shape, mesh_dim_names=names)


def make_config(options: argparse.Namespace, store) -> RetroConfig:
    sizes = {"chunk_len": store.chunk_len, "neighbour_len": 2 * store.chunk_len, "max_len": options.window}
    if options.preset:
        return RetroConfig.preset(options.preset, store.vocab_size).replace(**sizes)
    return RetroConfig.small(store.vocab_size, 64, 256, 4, 3, encoder_d_ff=128, share_embeddings=True, **sizes)


def main(arguments: list[str] | None = None) -> None:
    """Train, and continue from OUT/checkpoint if it exists."""
    options = parser().parse_args(arguments)
    device, mesh = make_mesh(options)
    data = mesh["data"].size()

    store = open_store(options.out / "store", verify=False)
    embedder = HashedTfidf.load(options.out / "embedder.npz")
    index = {"index": options.index, "nprobe": options.nprobe}
    database = ChunkDatabase.open(options.out / "keys", store, embedder, verify=False, **index)
    neighbours = open_neighbours(options.out / "neighbours", store, database)

    torch.manual_seed(0)
    model = Retro(make_config(options, store)).to(device)
    if options.tensor > 1:
        parallelize(model, mesh["tensor"])
    training.shard(model, mesh[("data", "sequence")]._flatten("shards"))
    autocast = "bfloat16" if device.type == "cuda" else None
    settings = Settings(options.steps, warmup_steps=min(10, options.steps), max_lr=1e-3, autocast=autocast)
    optimizer = training.make_optimizer(model, settings)
    place, start = options.out / "checkpoint", 0
    if (place / "state.json").exists():
        start = checkpoint.load(place, model, optimizer)["step"]
    found = {"neighbours": neighbours, "database": database, "k": options.k}
    share = {"batch_size": options.batch // data, "rank": mesh["data"].get_local_rank(), "world_size": data}
    rows = WindowDataset(store, window=options.window, seed=0, start=start, **share, **found)
    stream = iter(training.prefetched(rows, options.workers))
    if options.sequence > 1:
        stream = map(SequencePart(mesh["sequence"]).split, stream)

    def report(step: int, results: dict) -> None:
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {results['loss']:.4f}, {results['waiting']:.1%} waiting for data", flush=True)
        if step + 1 == options.steps or (options.save_every and (step + 1) % options.save_every == 0):
            checkpoint.save(place, model, optimizer, step=step + 1, position=step + 1)

    training.train(model, optimizer, stream, settings, start=start, report=report)


if __name__ == "__main__":
    main()
