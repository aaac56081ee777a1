"""Real text: a Memory Mosaic and transformers of equal size, within the training length and beyond it.

All models have the same depth and about the same number of parameters, and train on the same windows. Learned positions
end at the training length, so that transformer is scored within it only. Rotary positions exist beyond it, but were
never trained there. A Memory Mosaic has no positions. Training and scored texts are the sources of Python's standard
library; the scored packages are held out.

    python examples/mosaics_text.py                       # about five minutes on two cores
    python examples/mosaics_text.py --steps 1500 --batch 16 --picture text.png

Source: Zhang et al., arXiv 2405.06394, section 5, figures 10 and 13.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from baseline import Transformer, TransformerConfig
from torch import Tensor, nn

from retro_model import training
from retro_model.data.tokens import BOS, Tokenizer
from retro_model.memory_mosaics import MemoryMosaics, MosaicsConfig

MOSAICS, LEARNED, ROTARY = "Memory Mosaics", "transformer, learned positions", "transformer, rotary positions"
HELD_OUT = ("bisect", "calendar", "csv", "fractions", "heapq", "optparse", "shutil", "socket", "textwrap", "uuid")
SPANS = 8  # number of spans of positions in the table


def documents(held_out: bool, most: int) -> list[str]:
    """Return sources of Python's standard library of at most `most` characters in total."""
    root, texts, total = Path(sysconfig.get_path("stdlib")), [], 0
    for path in sorted(root.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        if (path.stem in HELD_OUT) == held_out and text.strip() and total + len(text) <= most:
            texts.append(text)
            total += len(text)
    return texts


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Return the tokens of all texts in one row, with BOS before each text."""
    return np.concatenate([np.concatenate([[BOS], ids]) for ids in tokenizer.encode_batch(texts)])


def make(name: str, vocab_size: int, context: int, d_model: int, layers: int) -> nn.Module:
    """Return the model of this name."""
    torch.manual_seed(0)
    heads = d_model // 16
    if name == MOSAICS:
        return MemoryMosaics(MosaicsConfig(vocab_size, d_model, heads, layers, persistent_slots=7 * d_model // 2))
    positions = "rotary" if name == ROTARY else "learned"
    return Transformer(TransformerConfig(vocab_size, d_model, heads, layers, positions=positions, max_len=context))


def stream(ids: np.ndarray, context: int, batch: int):
    """Iterate over batches of random windows forever. They are the same for every model."""
    random = np.random.default_rng(0)
    while True:
        starts = random.integers(len(ids) - context, size=batch)
        tokens = torch.from_numpy(np.stack([ids[start : start + context] for start in starts]))
        yield training.Batch(tokens, torch.ones_like(tokens, dtype=torch.bool))


def windows(ids: np.ndarray, length: int, count: int) -> Tensor:
    """Return at most `count` windows [W,length], evenly spaced over the text."""
    starts = np.linspace(0, len(ids) - length, min(count, len(ids) // length)).astype(int)
    return torch.from_numpy(np.stack([ids[start : start + length] for start in starts]))


@torch.no_grad()
def losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the nats [W,N-1] of each token of windows [W,N] but the first."""
    model.eval()
    logits = ((model(part)[:, :-1].transpose(1, 2), part[:, 1:]) for part in tokens.split(4))
    return torch.cat([F.cross_entropy(predicted, wanted, reduction="none") for predicted, wanted in logits])


def main(arguments: list[str] | None = None) -> dict[str, tuple[float, float]]:
    """Train, score and draw. Return the nats per token within the training length and at the last positions."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    sizes = {"steps": 200, "batch": 8, "context": 128, "longest": 1024, "width": 64, "layers": 2, "vocabulary": 1024}
    for name, default in (sizes | {"characters": 2_000_000, "windows": 20}).items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--rate", type=float, default=4e-3, help="learning rate (default: 0.004)")
    parser.add_argument("--picture", default="", help="write the curves to this file")
    options = parser.parse_args(arguments)
    texts = documents(False, options.characters)
    tokenizer = Tokenizer.train(texts, options.vocabulary)
    ids = encode(tokenizer, texts)
    long = windows(encode(tokenizer, documents(True, options.characters)), options.longest, options.windows)
    short = long.reshape(-1, options.context)
    print(f"{len(ids):,} tokens to train on; scored: {len(long)} windows of {options.longest} held-out tokens")
    settings = training.Settings(options.steps, options.rate, warmup_steps=options.steps // 20)
    results, curves = {}, {}
    for name in (MOSAICS, LEARNED, ROTARY):
        model = make(name, tokenizer.vocab_size, options.context, options.width, options.layers)
        optimizer = training.make_optimizer(model, settings)
        batches = stream(ids, options.context, options.batch)
        training.train(model, optimizer, batches, settings)
        within = losses(model, short)
        if name == MOSAICS:
            first = within
        gap = (within - first).mean(1)
        parameters = sum(p.numel() for p in model.parameters())
        error = f"standard error over windows {gap.std() / len(gap) ** 0.5:.3f}"
        print(f"{name}, {parameters:,} parameters: {within.mean():.3f} nats per token to position {options.context}")
        print(f"  minus {MOSAICS}: {gap.mean():+.3f} ({error})")
        last = float("nan")
        if name != LEARNED:
            curves[name] = [float(span.mean()) for span in losses(model, long).tensor_split(SPANS, 1)]
            last = curves[name][-1]
            print(f"  by position to {options.longest}: {', '.join(f'{nats:.2f}' for nats in curves[name])}")
        results[name] = (float(within.mean()), last)
    if options.picture:
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(6, 3.6))
        for name, curve in curves.items():
            axes.plot((np.arange(SPANS) + 0.5) * options.longest / SPANS, curve, label=name)
        axes.axvline(options.context, color="grey", linestyle="--", linewidth=0.8)
        axes.set(xlabel="position (dashed: training length)", ylabel="nats per token")
        axes.legend()
        figure.savefig(options.picture, dpi=110, bbox_inches="tight")
    return results


if __name__ == "__main__":
    main()
