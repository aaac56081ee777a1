"""Time whole training steps of language models beside their baselines.

    python examples/model_steps.py --out steps.json  # Memory Mosaics and a rotary transformer
    python examples/model_steps.py retro --out steps.json  # RETRO and its own baseline at 425m's proportions

A step is `training.train_step`: forward, loss, backward, clipping and AdamW. For bfloat16 it runs under autocast, with
parameters in float32. The process keeps freed memory, as `training.train` does with keep_memory. Contenders take turns,
one in memory at a time, so that other work on the machine hits all. The least time of each counts.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from baseline import Transformer, TransformerConfig
from torch import nn

from retro_bench.records import environment, record
from retro_model import Retro, RetroConfig, training
from retro_model.memory_mosaics import MemoryMosaics, MosaicsConfig

MOSAICS, TRANSFORMER = "Memory Mosaics", "transformer, rotary"
RETRO, BASELINE = "RETRO", "its baseline"
DTYPES = {"float32": None, "bfloat16": "bfloat16"}  # type of products -> training.Settings.autocast
DIVISOR, NEIGHBOURS = 4, 2  # divisor of RETRO 425m's widths, and K


class Contender(NamedTuple):
    """Builder of a model, and the batch that it is trained on."""

    build: Callable[[], nn.Module]
    batch: training.Batch


def mosaics_contenders(config: MosaicsConfig, shape: tuple[int, int]) -> dict[str, Contender]:
    """Return a transformer and Memory Mosaics, which has as many parameters and a few scalars more."""
    sizes, batch = (config.vocab_size, config.d_model, config.num_heads, config.num_layers), _batch(config, shape)
    return {
        TRANSFORMER: Contender(lambda: Transformer(TransformerConfig(*sizes)), batch),
        MOSAICS: Contender(lambda: MemoryMosaics(config), batch),
    }


def retro_contenders(config: RetroConfig, shape: tuple[int, int]) -> dict[str, Contender]:
    """Return the decoder without retrieval, and RETRO with K random neighbours."""
    batch = _batch(config, shape)
    size = (shape[0], shape[1] // config.chunk_len, config.num_neighbours, config.neighbour_len)
    neighbours = torch.randint(config.vocab_size, size, generator=torch.Generator().manual_seed(1))
    retrieved = training.Batch(batch.tokens, batch.real, neighbours, torch.ones_like(neighbours, dtype=torch.bool))
    return {
        BASELINE: Contender(lambda: Retro(config.baseline()), batch),
        RETRO: Contender(lambda: Retro(config), retrieved),
    }


def retro_config(divisor: int) -> RetroConfig:
    """Return the paper's 425m with widths, heads and vocabulary divided: same proportions, same depth."""
    paper = RetroConfig.preset("425m")
    names = ("vocab_size", "d_model", "d_ff", "num_heads", "encoder_d_model", "encoder_d_ff", "encoder_heads")
    return paper.replace(num_neighbours=NEIGHBOURS, **{name: getattr(paper, name) // divisor for name in names})


def _batch(config, shape: tuple[int, int]) -> training.Batch:
    tokens = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    return training.Batch(tokens, torch.ones_like(tokens, dtype=torch.bool))


def measure(contender: Contender, dtype: str, steps: int) -> list[dict[str, float]]:
    """Return loss, wall time and processor time of each of `steps` training steps of a new model."""
    torch.manual_seed(0)
    model, settings = contender.build(), training.Settings(steps, warmup_steps=0, autocast=DTYPES[dtype])
    optimizer = training.make_optimizer(model, settings)
    samples = []
    for step in range(steps):
        wall, cpu = time.perf_counter(), time.process_time()
        loss = training.train_step(model, optimizer, [contender.batch], settings, step)["loss"]
        samples.append({"loss": loss, "seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu})
    return samples


def run(
    contenders: dict[str, Contender], rounds: int, steps: int, dtypes: Sequence[str] = tuple(DTYPES), say=print
) -> list[dict]:
    """Return a row for each type and model: all samples, the least times, and their ratio to the first contender's."""
    first, rows = next(iter(contenders)), []
    for dtype in dtypes:
        samples: dict[str, list] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, contender in contenders.items():
                samples[name] += measure(contender, dtype, steps)
                gc.collect()
        keys = ("seconds", "cpu_seconds")
        least = {name: {key: min(s[key] for s in taken) for key in keys} for name, taken in samples.items()}
        for name, times in least.items():
            ratio = {key: times[key] / least[first][key] for key in times}
            rows.append({"dtype": dtype, "model": name, **times, f"over_{first}": ratio, "samples": samples[name]})
            say(
                f"{dtype:9s} {name:20s} {times['seconds']:7.2f} s by the clock ({ratio['seconds']:.2f} of the first), "
                f"{times['cpu_seconds']:7.2f} s of processor time ({ratio['cpu_seconds']:.2f})"
            )
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("family", nargs="?", choices=("mosaics", "retro"), default="mosaics")
    parser.add_argument("--out", type=Path, help="write the record to this file, as JSON")
    for name, default in (("threads", 2), ("batch", 2), ("length", 512), ("rounds", 2), ("steps", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    training.keep_memory()
    shape = (options.batch, options.length)
    if options.family == "retro":
        contenders = retro_contenders(retro_config(DIVISOR), shape)
    else:
        config = MosaicsConfig.preset("small").replace(attention_dropout=0.0, output_dropout=0.0)
        contenders = mosaics_contenders(config, shape)
    rows = run(contenders, options.rounds, options.steps, options.dtypes)
    if options.out is not None:
        settings = {key: value for key, value in vars(options).items() if key != "out"}
        where = {"git": environment.git_state(), "environment": environment.environment()}
        where["device"] = environment.device("cpu")
        report = {"at": record.now(), "options": settings, **where, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
