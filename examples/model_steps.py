"""Time of whole training steps: Memory Mosaics next to a rotary transformer with as many parameters.

A step is `training.train_step`: forward, loss, backward, clipping and AdamW. The models take turns, so that other work
on the machine slows both. The least time of each counts:

    python examples/model_steps.py --length 512
"""

import argparse
import time

import torch
from baseline import Transformer, TransformerConfig

from retro_model import training
from retro_model.memory_mosaics import MemoryMosaics, MosaicsConfig


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Return the least seconds per step of each model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name, default in (("vocab_size", 8192), ("d_model", 512), ("layers", 4), ("length", 256), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    sizes = (options.vocab_size, options.d_model, 4, options.layers)
    slots = 7 * options.d_model // 2  # persistent pairs that give a block the size of a transformer's
    mosaics = MemoryMosaics(MosaicsConfig(*sizes, slots, attention_dropout=0.0, output_dropout=0.0))
    models = {"transformer": Transformer(TransformerConfig(*sizes)), "Memory Mosaics": mosaics}
    settings = training.Settings(options.steps, warmup_steps=0)
    optimizers = {name: training.make_optimizer(model, settings) for name, model in models.items()}
    tokens = torch.randint(options.vocab_size, (2, options.length))
    batch = training.Batch(tokens, torch.ones_like(tokens, dtype=torch.bool))
    least = dict.fromkeys(models, float("inf"))
    for step in range(options.steps):
        for name, model in models.items():
            begun = time.perf_counter()
            loss = training.train_step(model, optimizers[name], [batch], settings, step)["loss"]
            least[name] = min(least[name], time.perf_counter() - begun)
            print(f"step {step}, {name}: loss {loss:.3f}, {least[name]:.3f} s at least")
    return least


if __name__ == "__main__":
    main()
