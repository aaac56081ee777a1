"""Three moons: memories that each track one moon predict the sky before it has repeated.

An observation is three complex numbers of modulus 1 that turn with different periods. A network of one memory has to
wait until all three moons have returned together, which takes the least common multiple of their periods. A network of
three memories can use one memory per moon, so it has to wait for the longest period only. Nobody tells it to:
training alone assigns one moon to each memory ("predictive disentanglement").

The control is the network with one memory. The periods that are scored were held out from training.

    python examples/moons.py                                          # about a minute on two cores
    python examples/moons.py --length 800 --batch 64 --seeds 3        # the paper's sizes

Source: Zhang et al., arXiv 2405.06394, section 3, figures 4 to 6.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import torch
from torch import Tensor, nn

from retro_model.memory_mosaics.contextual_memory import read

BANDWIDTH = 50.0**0.5  # square root of the inverse bandwidth beta, which is not trained
PHASE = 0.3  # phase of every moon at time 0
CLIP = 0.5  # Errors are clipped in the loss, so that the unavoidable errors of an empty memory do not dominate.
AHEAD = 25  # number of free-running predictions that are scored
JOINT_PERIODS = 3  # number of joint periods in a sequence
#: Periods in units of a common one: the triples of numbers up to 7 with the smallest least common multiples.
TRAINED = ((1, 2, 4), (1, 2, 6), (1, 3, 6), (2, 3, 6), (1, 2, 5), (1, 3, 4), (1, 4, 6), (2, 3, 4))
HELD_OUT = (1, 2, 3)


def periods(triple: tuple[int, int, int], length: int) -> list[float]:
    """Return the periods in steps, so that `length` steps are JOINT_PERIODS joint periods."""
    return [length / JOINT_PERIODS / math.lcm(*triple) * period for period in triple]


def observe(moons, length: int, start: Tensor) -> Tensor:
    """Return observations [B,length,3] of moons with periods [B,3] or [3] from the times `start` [B] on."""
    time = start[:, None] + torch.arange(length, dtype=torch.float64)
    angle = 2 * math.pi * time[..., None] / torch.as_tensor(moons, dtype=torch.float64).view(-1, 1, 3) + PHASE
    return torch.polar(torch.ones_like(angle), angle)


class Moons(nn.Module):
    """One layer of `heads` memories over three complex numbers, without norms and averages.

    The key is W_key x_T, the value is W_value x_{T+1}, and the prediction is W_output times the value that is read. A
    dot product of complex numbers is the real part of the Hermitian product.
    """

    def __init__(self, heads: int):
        super().__init__()
        self.heads = heads
        # [3,3,2]: real and imaginary parts
        self.key, self.value, self.output = (nn.Parameter(torch.randn(3, 3, 2) * 6**-0.5) for _ in range(3))

    def magnitudes(self) -> list[Tensor]:
        """Return the absolute values [3,3] of the three matrices."""
        return [torch.view_as_complex(weight.detach()).abs() for weight in self.parameters()]

    def project(self, weight: Tensor, x: Tensor) -> Tensor:
        """Return W x of complex x [B,N,3] as real numbers [B,N,heads,6/heads]."""
        return torch.view_as_real(x @ torch.view_as_complex(weight).T).flatten(-2).unflatten(-1, (self.heads, -1))

    def predict(self, query: Tensor, keys: Tensor, values: Tensor, causal: bool) -> Tensor:
        """Return predictions [B,n,3] for queries that read the pairs of `keys` and `values`."""
        y, _ = read(BANDWIDTH * query, BANDWIDTH * keys, values, causal=causal)
        y = torch.view_as_complex(y.flatten(-2).unflatten(-1, (3, 2)).contiguous())
        return y @ torch.view_as_complex(self.output).T

    def forward(self, x: Tensor) -> Tensor:
        """Return predictions [B,N-1,3] of x [B,N,3] from the second observation on."""
        key, value = self.project(self.key, x), self.project(self.value, x)
        return self.predict(key[:, :-1], key[:, :-2], value[:, 1:-1], causal=True)

    @torch.no_grad()
    def run_on(self, x: Tensor, steps: int) -> Tensor:
        """Return `steps` predictions [B,steps,3] after x [B,T,3]. Each prediction is fed back as an observation."""
        key, value, outputs = self.project(self.key, x), self.project(self.value, x), []
        for _ in range(steps):
            z = self.predict(key[:, -1:], key[:, :-1], value[:, 1:], causal=False)
            key = torch.cat([key, self.project(self.key, z)], 1)
            value = torch.cat([value, self.project(self.value, z)], 1)
            outputs.append(z)
        return torch.cat(outputs, 1)


def train(heads: int, length: int, batch: int, steps: int, seed: int) -> Moons:
    """Train a network on the triples that are not held out."""
    torch.manual_seed(seed)
    random, model = np.random.default_rng(seed), Moons(heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / steps)
        triples = [TRAINED[i] for i in random.integers(len(TRAINED), size=batch)]
        start = torch.from_numpy(random.uniform(0, length / JOINT_PERIODS, batch))
        x = observe([periods(triple, length) for triple in triples], length, start).to(torch.complex64)
        error = torch.view_as_real(model(x) - x[:, 1:]).clamp(-CLIP, CLIP)
        optimizer.zero_grad()
        error.square().mean().backward()
        optimizer.step()
    return model


def generation_error(model: Moons, x: Tensor, context: int) -> float:
    """Return the mean |error| of AHEAD predictions after `context` observations of x [B,N,3]."""
    return float((model.run_on(x[:, :context], AHEAD) - x[:, context : context + AHEAD]).abs().mean())


def draw(path: str, contexts: list[int], curves: dict[str, list[float]], moons: list[float], joint: float) -> None:
    """Draw the error against the number of observations, with lines at the moons' periods and the joint period."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    for name, curve in curves.items():
        axes.plot(contexts, curve, label=name)
    for period in moons:
        axes.axvline(period, color="black", linewidth=0.8)
    axes.axvline(joint, color="red", linewidth=1.2)
    axes.set(xlabel="observations (black: periods, red: joint period)", ylabel=f"mean |error| of the next {AHEAD}")
    axes.legend()
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    """Train, score and draw. Return the errors of one memory and of three at 1.1 times the longest period."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name, default in (("length", 400), ("batch", 8), ("steps", 500), ("seeds", 1)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--picture", default="", help="write the curves to this file")
    options = parser.parse_args(arguments)
    moons, joint = periods(HELD_OUT, options.length), options.length / JOINT_PERIODS
    claimed = round(1.1 * max(moons))
    contexts = sorted({*range(10, options.length - AHEAD, max(10, options.length // 20)), claimed})
    x = observe(moons, options.length, torch.linspace(0, joint, 33, dtype=torch.float64)[:-1]).to(torch.complex64)
    print(f"held-out periods {', '.join(f'{p:.1f}' for p in moons)}; all moons return together after {joint:.1f} steps")
    curves, at_claimed = {}, {1: [], 3: []}
    for heads in (1, 3):
        for seed in range(options.seeds):
            model = train(heads, options.length, options.batch, options.steps, seed)
            name = f"{heads} memor{'ies' if heads > 1 else 'y'}, seed {seed}"
            curves[name] = [generation_error(model, x, context) for context in contexts]
            at_claimed[heads].append(curves[name][contexts.index(claimed)])
            # For a permutation matrix, the second-largest entry of a row is 0.
            second = max(float((w / w.amax(1, keepdim=True)).sort(1).values[:, -2].max()) for w in model.magnitudes())
            shown = ", ".join(f"T={t} {curves[name][contexts.index(t)]:.2f}" for t in contexts[:: len(contexts) // 6])
            print(f"{name}: error after T observations: {shown}; second-largest entry per row {second:.2f}")
    one, three = min(at_claimed[1]), max(at_claimed[3])
    print(
        f"after {claimed} observations, 1.1 times the longest period: one memory {one:.2f}, three memories {three:.2f}"
    )
    if options.picture:
        draw(options.picture, contexts, curves, moons, joint)
    return one, three


if __name__ == "__main__":
    main()
