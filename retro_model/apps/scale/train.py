"""Trains a RETRO on what `build` left, on as many processes as torchrun starts.

    torchrun --standalone --nproc-per-node 8 -m retro_model scale train OUT --preset 172m --sequence 2 --tensor 2

Processes form a mesh data x sequence x tensor: FSDP2 over the first two, ranges of each sequence in the second, heads
in the third. Windows are read from memory maps by worker processes ahead of time; the share of the time that steps wait
for them is printed.
"""

from __future__ import annotations

import os
from argparse import Namespace

import torch
import torch.distributed as dist

from retro_model import Retro, RetroConfig, training
from retro_model.parallel import SequencePart, parallelize
from retro_model.training import Settings, WindowDataset, sharded_checkpoint

from .build import opened


def config_of(preset: str | None, vocab_size: int, chunk_len: int, window: int) -> RetroConfig:
    sizes = {"chunk_len": chunk_len, "neighbour_len": 2 * chunk_len, "max_len": window}
    if preset:
        return RetroConfig.preset(preset, vocab_size).replace(**sizes)
    return RetroConfig.small(vocab_size, 64, 256, 4, 3, encoder_d_ff=128, share_embeddings=True, **sizes)


def main(options: Namespace) -> list[dict]:
    """Runs; the results of every step. Continues from `checkpoint` where there is one."""
    device, mesh = _mesh(options)
    data, rank = mesh["data"].size(), mesh["data"].get_local_rank()
    store, database, neighbours = opened(options.out)
    config = config_of(options.preset, store.vocab_size, store.chunk_len, options.window)
    torch.manual_seed(0)
    model = Retro(config).to(device)
    if options.tensor > 1:
        parallelize(model, mesh["tensor"])
    training.shard(model, mesh[("data", "sequence")]._flatten("shards"))
    settings = Settings(
        options.steps,
        warmup_steps=min(10, options.steps),
        max_lr=1e-3,
        autocast="bfloat16" if device.type == "cuda" else None,
    )
    optimizer = training.make_optimizer(model, settings)
    place, start = options.out / "checkpoint", 0
    if (place / "state.json").exists():
        start = sharded_checkpoint.load(place, model, optimizer)["step"]
    rows = WindowDataset(
        store,
        window=options.window,
        batch_size=options.batch // data,
        seed=0,
        neighbours=neighbours,
        database=database,
        k=options.k,
        start=start,
        rank=rank,
        world_size=data,
    )
    part = SequencePart(mesh["sequence"], options.exchange) if options.sequence > 1 else None
    stream = training.prefetched(rows, options.workers)
    first = dist.get_rank() == 0

    def report(step: int, results: dict) -> None:
        if first:
            print(
                f"step {step + 1}: loss {results['loss']:.4f}, gradient norm {results['gradient_norm']:.3f}, "
                f"{results['tokens']} tokens, {results['waiting']:.1%} waiting for data",
                flush=True,
            )
        if step + 1 == options.steps or (options.save_every and (step + 1) % options.save_every == 0):
            sharded_checkpoint.save(place, model, optimizer, step=step + 1, position=step + 1)

    mine = stream if part is None else map(part.split, stream)
    history = training.train(model, optimizer, mine, settings, start=start, report=report, keep_memory=True)
    if first and history:
        later = history[1:] or history  # the readers start in the first
        share = sum(h["waiting"] * h["seconds"] for h in later) / sum(h["seconds"] for h in later)
        done = f"{dist.get_world_size()} processes, {len(history)} steps"
        print(f"{done}; after the first, {share:.1%} of the time waiting for data", flush=True)
    return history


def _mesh(options: Namespace):
    """This process's device, and the mesh of all."""
    gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo")
    data, left = divmod(dist.get_world_size(), options.sequence * options.tensor)
    if left or options.batch % data:
        raise SystemExit(
            f"--sequence x --tensor must divide the {dist.get_world_size()} processes, and their quotient --batch"
        )
    names = ("data", "sequence", "tensor")
    return device, dist.init_device_mesh(device.type, (data, options.sequence, options.tensor), mesh_dim_names=names)
