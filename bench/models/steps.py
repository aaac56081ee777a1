"""Whole training steps of language models' shapes, beside what they are compared with.

    python -m bench.models.steps --out steps.json  # Memory Mosaics, a rotary transformer, the authors' way
    python -m bench.models.steps retro --out steps.json  # RETRO and its own baseline at 425m's proportions

A step is forward, loss, backward, clipping and AdamW, as `training.train_step` takes it; bfloat16 is autocast's, with
parameters in float32, and the process keeps what its steps free, as `training.train` has it. Contenders take turns, one
in memory at a time, so that a busy machine is busy for all; of each the least is kept.

In float32 a step's floor is stated with it: the time of its matrix products at the best rate that any library reached
on this machine in the same run, and that of the kernels as they ran. What a step takes beyond it is all else: norms,
activations, additions, the optimiser, copies, Python. Beside it stands what can be had at most: those products, each
shape's at the rate that it reaches alone, the kernels, and the bytes that all else must move (`bound`) at the
measured bandwidth.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from retro_model import Retro, RetroConfig, training
from retro_model.apps.mosaics.transformer import Transformer, TransformerConfig
from retro_model.memory_mosaics import MemoryMosaics, MosaicsConfig
from retro_model.memory_mosaics.model import Block

from ..measure import ceilings
from ..records import environment, record
from . import blocks, bound

MOSAICS, TRANSFORMER, AUTHORS = "Memory Mosaics", "transformer, rotary", "the authors' way"
RETRO, BASELINE = "RETRO", "its baseline"
DTYPES = {"float32": None, "bfloat16": "bfloat16"}  # of products -> training.Settings.autocast


class Contender(NamedTuple):
    """Builder of a model, and the batch that it is trained on."""

    build: Callable[[], nn.Module]
    batch: training.Batch


class ByMatrices(Block):
    """A block whose averages and reads are matrices in memory."""

    def forward(self, x: Tensor, segment: Tensor | None = None, states: tuple = (None, None)) -> Tensor:
        return blocks.by_matrices(x, **dict(self.named_parameters()))


def mosaics(config: MosaicsConfig, block: type[Block] = Block) -> MemoryMosaics:
    model = MemoryMosaics(config)
    for each in model.blocks:
        each.__class__ = block
    return model


def mosaics_contenders(config: MosaicsConfig, shape: tuple[int, int]) -> dict[str, Contender]:
    """Models of equal size but for the memories' scalars; what they are compared with is TRANSFORMER."""
    sizes, batch = (config.vocab_size, config.d_model, config.num_heads, config.num_layers), _batch(config, shape)
    return {
        TRANSFORMER: Contender(lambda: Transformer(TransformerConfig(*sizes)), batch),
        MOSAICS: Contender(lambda: mosaics(config), batch),
        AUTHORS: Contender(lambda: mosaics(config, ByMatrices), batch),
    }


def retro_contenders(config: RetroConfig, shape: tuple[int, int], distinct: float = 1.0) -> dict[str, Contender]:
    """RETRO with K neighbours drawn at random, and the same decoder without retrieval, which comes first.

    distinct: share of the batch's neighbours that are no others' repetitions.
    """
    batch = _batch(config, shape)
    size = (shape[0], shape[1] // config.chunk_len, config.num_neighbours)
    count, rng = math.prod(size), torch.Generator().manual_seed(1)
    some = torch.randint(config.vocab_size, (max(1, round(distinct * count)), config.neighbour_len), generator=rng)
    neighbours = some[torch.arange(count) % len(some)].view(*size, config.neighbour_len)
    retrieved = training.Batch(batch.tokens, batch.real, neighbours, torch.ones_like(neighbours, dtype=torch.bool))
    return {
        BASELINE: Contender(lambda: Retro(config.baseline()), batch),
        RETRO: Contender(lambda: Retro(config), retrieved),
    }


def retro_config(divisor: int, num_neighbours: int = 2) -> RetroConfig:
    """The paper's 425m with widths, heads and vocabulary divided: the same proportions, and depth."""
    paper = RetroConfig.preset("425m")
    names = ("vocab_size", "d_model", "d_ff", "num_heads", "encoder_d_model", "encoder_d_ff", "encoder_heads")
    return paper.replace(num_neighbours=num_neighbours, **{name: getattr(paper, name) // divisor for name in names})


def _batch(config, shape: tuple[int, int]) -> training.Batch:
    tokens = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    return training.Batch(tokens, torch.ones_like(tokens, dtype=torch.bool))


def _prepare(contender: Contender, dtype: str, steps: int):
    torch.manual_seed(0)
    model, settings = contender.build(), training.Settings(steps, warmup_steps=0, autocast=DTYPES[dtype])
    return model, training.make_optimizer(model, settings), settings


def measure(contender: Contender, dtype: str, steps: int) -> list[dict[str, float]]:
    """Loss, seconds by the clock and of processor time of each of `steps` training steps of a new model."""
    model, optimizer, settings = _prepare(contender, dtype, steps)
    samples = []
    for step in range(steps):
        wall, cpu = time.perf_counter(), time.process_time()
        loss = training.train_step(model, optimizer, [contender.batch], settings, step)["loss"]
        samples.append({"loss": loss, "seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu})
    return samples


def kernel_seconds(contender: Contender, steps: int = 2) -> float:
    """Time the package's own ops within a step, forward and backward: the least of some profiled steps."""
    model, optimizer, settings = _prepare(contender, "float32", steps)
    times = []
    for step in range(steps):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            training.train_step(model, optimizer, [contender.batch], settings, step)
        events = [e for e in profile.key_averages() if "retro_kernels" in e.key]
        times.append(sum(e.self_cpu_time_total for e in events) * 1e-6)
    return min(times)


def run(
    contenders: dict[str, Contender],
    rounds: int,
    steps: int,
    dtypes: Sequence[str] = tuple(DTYPES),
    say: Callable[[str], None] = print,
) -> list[dict]:
    """A row a type and model: all its samples, its least times, and those over the first contender's."""
    first, rows = next(iter(contenders)), []
    for dtype in dtypes:
        samples: dict[str, list] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, contender in contenders.items():
                samples[name] += measure(contender, dtype, steps)
                gc.collect()
        least = {
            name: {key: min(s[key] for s in times) for key in ("seconds", "cpu_seconds")}
            for name, times in samples.items()
        }
        for name, times in least.items():
            ratio = {key: times[key] / least[first][key] for key in times}
            rows.append({"dtype": dtype, "model": name, **times, f"over_{first}": ratio, "samples": samples[name]})
            say(
                f"{dtype:9s} {name:20s} {times['seconds']:7.2f} s by the clock ({ratio['seconds']:.2f} of the first), "
                f"{times['cpu_seconds']:7.2f} s of processor time ({ratio['cpu_seconds']:.2f})"
            )
    return rows


def floors(contenders: dict[str, Contender], rows: list[dict], say: Callable[[str], None] = print) -> dict:
    """Adds to the float32 rows their floor and what bounds them; returns what was measured for it."""
    measured = [ceilings.measure("cpu") for _ in range(2)]
    rate = max(each["flops_per_s"]["float32"] for each in measured)
    bandwidth = max(each["bytes_per_s"] for each in measured)
    for row in rows:
        if row["dtype"] != "float32":
            continue
        contender = contenders[row["model"]]
        found = bound.products(contender.build(), contender.batch)
        moved = bound.moved_bytes(contender.build(), contender.batch)
        flops, alone, kernels = bound.flops(found), bound.seconds_alone(found), kernel_seconds(contender)
        gc.collect()
        passes = sum(moved.values()) / bandwidth
        floor, least = flops / rate + kernels, alone + kernels + passes
        row["floor"] = {"product_flops": flops, "products_seconds": flops / rate, "kernels_seconds": kernels}
        row["bound"] = {"products_alone_seconds": alone, "moved_bytes": moved, "moved_seconds": passes}
        row["over_floor"], row["bound_over_floor"] = row["seconds"] / floor, least / floor
        say(
            f"float32   {row['model']:20s} {row['over_floor']:.2f} of its floor: {flops / rate:.2f} s of products at "
            f"{rate * 1e-9:.0f} GFLOP/s and {kernels:.2f} s of kernels; bound {least / floor:.2f}: {alone:.2f} s "
            f"of products alone, kernels, and {passes:.3f} s for {sum(moved.values()) * 1e-9:.2f} GB"
        )
    return {"float32_flops_per_s": rate, "bytes_per_s": bandwidth}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.models.steps", description=__doc__.split("\n\n")[0])
    parser.add_argument("family", nargs="?", choices=("mosaics", "retro"), default="mosaics")
    parser.add_argument("--out", type=Path, help="the record, JSON")
    parser.add_argument("--preset", default="small", help="name of the MosaicsConfig")
    parser.add_argument("--divisor", type=int, default=4, help="divide the widths of RETRO 425m by this")
    parser.add_argument("--neighbours", type=int, default=2, help="neighbours K a chunk, RETRO")
    parser.add_argument("--distinct", type=float, default=1.0, help="share of distinct neighbours, RETRO")
    for name, default in (("threads", 2), ("batch", 2), ("length", 512), ("rounds", 2), ("steps", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    training.keep_memory()
    shape = (options.batch, options.length)
    if options.family == "retro":
        contenders = retro_contenders(retro_config(options.divisor, options.neighbours), shape, options.distinct)
    else:
        config = MosaicsConfig.preset(options.preset).replace(attention_dropout=0.0, output_dropout=0.0)
        contenders = mosaics_contenders(config, shape)
    rows = run(contenders, options.rounds, options.steps, options.dtypes)
    measured = floors(contenders, rows)
    if options.out is not None:
        settings = {key: value for key, value in vars(options).items() if key != "out"}
        where = {
            "git": environment.git_state(),
            "environment": environment.environment(),
            "device": environment.device("cpu"),
        }
        report = {"at": record.now(), "options": settings, **where, "ceilings": measured, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
