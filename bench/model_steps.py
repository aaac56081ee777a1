"""Whole training steps of a language model's shape: Memory Mosaics, a rotary transformer of equal size, and the
authors' way.

    python -m bench.model_steps --threads 2 --out steps.json

A step is forward, loss, backward, clipping and AdamW, as `training.train_step` takes it; bfloat16 is autocast's, with
parameters in float32. Contenders take turns, one in memory at a time, so that a busy machine is busy for all; of each
the least is kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from retro_model import training
from retro_model.demo.memory_mosaics.transformer import Transformer, TransformerConfig
from retro_model.memory_mosaics import MemoryMosaics, MosaicsConfig
from retro_model.memory_mosaics.model import Block

from . import environment, model_blocks, record

MOSAICS, TRANSFORMER, AUTHORS = "Memory Mosaics", "transformer, rotary", "the authors' way"
DTYPES = {"float32": None, "bfloat16": "bfloat16"}  # of products -> training.Settings.autocast


class ByMatrices(Block):
    """A block whose averages and reads are matrices in memory."""

    def forward(self, x: Tensor, segment: Tensor | None = None, states: tuple = (None, None)) -> Tensor:
        return model_blocks.by_matrices(x, **dict(self.named_parameters()))


def mosaics(config: MosaicsConfig, block: type[Block] = Block) -> MemoryMosaics:
    model = MemoryMosaics(config)
    for each in model.blocks:
        each.__class__ = block
    return model


def contenders(config: MosaicsConfig) -> dict[str, Callable[[], nn.Module]]:
    """What builds each model, of equal size but for the memories' scalars."""
    sizes = (config.vocab_size, config.d_model, config.num_heads, config.num_layers)
    return {
        MOSAICS: lambda: mosaics(config),
        TRANSFORMER: lambda: Transformer(TransformerConfig(*sizes)),
        AUTHORS: lambda: mosaics(config, ByMatrices),
    }


def measure(build: Callable[[], nn.Module], batch: training.Batch, dtype: str, steps: int) -> list[dict[str, float]]:
    """Loss, seconds by the clock and of processor time of each of `steps` training steps of a new model."""
    torch.manual_seed(0)
    model, settings = build(), training.Settings(steps, warmup_steps=0, autocast=DTYPES[dtype])
    optimizer, samples = training.make_optimizer(model, settings), []
    for step in range(steps):
        wall, cpu = time.perf_counter(), time.process_time()
        loss = training.train_step(model, optimizer, [batch], settings, step)["loss"]
        samples.append({"loss": loss, "seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu})
    return samples


def run(
    config: MosaicsConfig,
    shape: tuple[int, int],
    rounds: int,
    steps: int,
    dtypes=tuple(DTYPES),
    say: Callable[[str], None] = print,
) -> list[dict]:
    """A row a type and model: all its samples, its least times, and those over the transformer's."""
    tokens = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    batch, rows = training.Batch(tokens, torch.ones_like(tokens, dtype=torch.bool)), []
    for dtype in dtypes:
        samples: dict[str, list] = {name: [] for name in contenders(config)}
        for _ in range(rounds):
            for name, build in contenders(config).items():
                samples[name] += measure(build, batch, dtype, steps)
                gc.collect()
        least = {
            name: {key: min(s[key] for s in times) for key in ("seconds", "cpu_seconds")}
            for name, times in samples.items()
        }
        for name, times in least.items():
            ratio = {key: times[key] / least[TRANSFORMER][key] for key in times}
            rows.append({"dtype": dtype, "model": name, **times, "over_transformer": ratio, "samples": samples[name]})
            say(
                f"{dtype:9s} {name:20s} {times['seconds']:7.2f} s by the clock ({ratio['seconds']:.2f} of the "
                "transformer's), "
                f"{times['cpu_seconds']:7.2f} s of processor time ({ratio['cpu_seconds']:.2f})"
            )
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.model_steps", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="the record, JSON")
    parser.add_argument("--preset", default="small", help="of MosaicsConfig")
    for name, default in (("threads", 2), ("batch", 2), ("length", 512), ("rounds", 2), ("steps", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    config = MosaicsConfig.preset(options.preset).replace(attention_dropout=0.0, output_dropout=0.0)
    rows = run(config, (options.batch, options.length), options.rounds, options.steps, options.dtypes)
    if options.out is not None:
        settings = {key: value for key, value in vars(options).items() if key != "out"}
        where = {
            "git": environment.git_state(),
            "environment": environment.environment(),
            "device": environment.device("cpu"),
        }
        report = {"at": record.now(), "options": settings, **where, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
