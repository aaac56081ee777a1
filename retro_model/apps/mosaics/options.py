"""Sizes of the experiments, a class each; the named plans that `--plan` chooses from; options."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path


@dataclass(frozen=True)
class MoonsPlan:
    """Sizes; the defaults take two minutes on a core. The paper's: length 800, batch 64, 512 sequences."""

    length: int = 400
    batch_size: int = 8
    steps: int = 500
    seeds: int = 3
    sequences: int = 32  # scored
    every: int = 10  # observations between scored context lengths
    max_lr: float = 1e-2
    min_lr: float = 5e-6


@dataclass(frozen=True)
class RegBenchPlan:
    """Sizes. The paper's: words to 49 symbols, up to 40,000 training sequences, 200 epochs, tuned widths, depths and
    rates.

    rates: learning rates to try; each model takes the one that scores best on other automata after `steps` steps.
    """

    d_model: int = 64
    num_layers: int = 2
    num_heads: int = 4
    longest_word: int = 19
    train_sequences: int = 1000
    test_sequences: int = 100
    steps: int = 400
    batch_size: int = 16
    seeds: int = 1
    rates: tuple[float, ...] = (2e-3,)
    scored_steps: int = 10  # times that a run is scored
    weight_decay: float = 0.1


@dataclass(frozen=True)
class TextPlan:
    """Sizes: `context` tokens in training, `longest` when scored. The paper's models: `MosaicsConfig.preset`, context
    512.

    rates: learning rates to try; each model takes the one with the least training loss after `tuning_steps` steps.
    """

    corpus: str = "stdlib"
    other: str = "kjv"  # scored without training on it, if it is installed
    vocab_size: int = 2048
    d_model: int = 64
    num_layers: int = 4
    num_heads: int = 4
    context: int = 256
    longest: int = 1024
    steps: int = 500
    batch_size: int = 8
    rates: tuple[float, ...] = (2e-3,)
    tuning_steps: int = 200
    weight_decay: float = 0.1
    seed: int = 0
    train_characters: int = 4_000_000
    windows: int = 40  # scored, of `longest` tokens each
    capacities: tuple[int, ...] = (64, 128, 256, 512)
    bounded_windows: int = 8


_TINY = {"d_model": 32, "num_layers": 1, "num_heads": 2}
_WORDS = RegBenchPlan(**_TINY, longest_word=4, train_sequences=24, test_sequences=6, steps=4, batch_size=4)
_TEXT = TextPlan(**_TINY, vocab_size=300, context=32, longest=64, steps=3, batch_size=2, capacities=(8,))
_BIBLE = TextPlan("kjv", "stdlib", vocab_size=512, num_layers=2, context=128, batch_size=16, steps=1500)
PLANS = {
    "moons": {
        "default": MoonsPlan(),
        "smoke": MoonsPlan(length=72, batch_size=2, steps=4, seeds=1, sequences=2, every=12),
        "paper": MoonsPlan(length=800, batch_size=64, sequences=512),
    },
    "regbench": {
        "default": RegBenchPlan(),
        "smoke": replace(_WORDS, scored_steps=2),
        "thorough": RegBenchPlan(steps=600, seeds=3, rates=(2e-3, 5e-3), scored_steps=20),
    },
    "text": {
        "default": TextPlan(),
        "smoke": replace(_TEXT, train_characters=60_000, windows=4, bounded_windows=2),
        "kjv": replace(_BIBLE, rates=(3e-3, 8e-3), tuning_steps=150, capacities=(32, 64, 128, 256)),
    },
}
ABOUT = {
    "moons": "Three moons: memories that each track one moon predict the sky before it has ever repeated.",
    "regbench": "RegBench: learning the language of an automaton from the words before.",
    "text": "Real text: Memory Mosaics beside transformers of equal size, within and beyond the training length.",
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of `retro-model mosaics`, in which every field of a plan is an option."""
    about = "The Memory Mosaics paper's demonstrations: train, score, draw."
    top = argparse.ArgumentParser(prog="retro-model mosaics", description=about)
    commands = top.add_subparsers(dest="experiment", required=True)
    for name, about in ABOUT.items():
        add = commands.add_parser(name, help=about, description=about).add_argument
        out = f"{name}-out"
        add("--out", type=Path, default=Path(out), help=f"folder for everything that is made (default: {out})")
        add("--plan", choices=PLANS[name], default="default", help="sizes, which the options below change")
        minutes = "begin no training after this many minutes; the same command continues"
        add("--minutes", type=float, default=math.inf, help=minutes)
        add("--quiet", action="store_true", help="print nothing")
        for field in fields(PLANS[name]["default"]):
            many = isinstance(field.default, tuple)
            values = field.default if many else (field.default,)
            kind = {"type": type(values[0]), "metavar": type(values[0]).__name__, "nargs": "+" if many else None}
            add(f"--{field.name.replace('_', '-')}", **kind, help=f"default: {' '.join(map(str, values))}")
    return top
