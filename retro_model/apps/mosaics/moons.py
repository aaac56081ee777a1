"""Three moons: memories that each track one moon predict the sky before it has repeated.

An observation is three complex numbers e^{i theta}. A network with one head can predict after all three moons have
returned together: the least common multiple of their periods. With three heads it can after each moon has returned
once: the longest period. Training alone assigns moons to heads, the paper's "predictive disentanglement".

Source: Zhang et al., arXiv 2405.06394, section 3, figures 4 to 6; data as in the authors' code.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from retro_model.apps.report import Report
from retro_model.memory_mosaics.memory import read

from .options import MoonsPlan as Plan

INVERSE_BANDWIDTH = 50.0  # beta', fixed
PHASE = 0.3  # of every moon at time 0
CLIP = 0.5  # largest error in the loss, so that the unavoidable errors of an empty memory do not dominate
AHEAD = 25  # free-running predictions that are scored
JOINT_PERIODS = 3  # joint periods in a sequence
#: Periods in units of a common one: the triples from 1..7 without a common factor and with the smallest least common
#: multiple.
TRAINED = ((1, 2, 4), (1, 2, 6), (1, 3, 6), (2, 3, 6), (1, 2, 5), (1, 3, 4), (1, 4, 6), (2, 3, 4))
HELD_OUT = (1, 2, 3)
ANALYTIC_PERIODS = (4.0, 6.0, 10.0)


def periods(triple: tuple[int, int, int], length: int) -> tuple[float, ...]:
    """Return a triple's periods in steps: `length` steps are JOINT_PERIODS joint periods."""
    unit = length / JOINT_PERIODS / math.lcm(*triple)
    return tuple(unit * p for p in triple)


def observe(moons, length: int, start: Tensor) -> Tensor:
    """Return observations [B,length,3] of moons with periods [B,3] or [3], from times `start` [B]."""
    time = start[:, None] + torch.arange(length, dtype=torch.float64)
    angle = 2 * math.pi * time[..., None] / torch.as_tensor(moons, dtype=torch.float64).view(-1, 1, 3) + PHASE
    return torch.polar(torch.ones_like(angle), angle)


class Moons(nn.Module):
    """One layer of `heads` memories over three complex numbers: k_T = W_phi x_T, v_T = W_psi x_{T+1}, z_T = W_z y_T.

    A dot product is the real part of the Hermitian product, over a head's share of the numbers. There are neither norms
    nor averages.
    """

    def __init__(self, heads: int):
        super().__init__()
        self.heads = heads
        # [3,3,2]: real and imaginary parts; W_phi, W_psi, W_z of the paper
        self.key, self.value, self.output = (nn.Parameter(torch.randn(3, 3, 2) * 6**-0.5) for _ in range(3))

    def magnitudes(self) -> list[Tensor]:
        """Return |W_phi|, |W_psi| and |W_z|, [3,3] each."""
        return [torch.view_as_complex(weight.detach()).abs() for weight in self.parameters()]

    def project(self, weight: Tensor, x: Tensor) -> Tensor:
        """Return W x of complex x [B,N,3] as reals [B,N,heads,6/heads]."""
        return torch.view_as_real(x @ torch.view_as_complex(weight).T).flatten(-2).unflatten(-1, (self.heads, -1))

    def predict(self, query: Tensor, keys: Tensor, values: Tensor, causal: bool) -> Tensor:
        """Return z [B,n,3] for queries that read the pairs [B,S,heads,.]."""
        y, _ = read(math.sqrt(INVERSE_BANDWIDTH) * query, math.sqrt(INVERSE_BANDWIDTH) * keys, values, causal=causal)
        y = torch.view_as_complex(y.flatten(-2).unflatten(-1, (3, 2)).contiguous())
        return y @ torch.view_as_complex(self.output).T

    def forward(self, x: Tensor) -> Tensor:
        """Return predictions [B,N-1,3] of x [B,N,3] from the second observation on, each from those before it."""
        key, value = self.project(self.key, x), self.project(self.value, x)
        return self.predict(key[:, :-1], key[:, :-2], value[:, 1:-1], causal=True)

    @torch.no_grad()
    def run_on(self, x: Tensor, steps: int) -> Tensor:
        """Return `steps` free-running predictions [B,steps,3] after x [B,T,3]: each is fed back as an observation."""
        key, value, outputs = self.project(self.key, x), self.project(self.value, x), []
        for _ in range(steps):
            z = self.predict(key[:, -1:], key[:, :-1], value[:, 1:], causal=False)
            key = torch.cat([key, self.project(self.key, z)], 1)
            value = torch.cat([value, self.project(self.value, z)], 1)
            outputs.append(z)
        return torch.cat(outputs, 1)


def train(heads: int, plan: Plan, seed: int) -> Moons:
    """Train a network on the triples that are not held out."""
    torch.manual_seed(seed)
    random, model = np.random.default_rng(seed), Moons(heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.max_lr)
    for step in range(plan.steps):
        optimizer.param_groups[0]["lr"] = plan.max_lr + (plan.min_lr - plan.max_lr) * step / plan.steps
        triples = [TRAINED[i] for i in random.integers(len(TRAINED), size=plan.batch_size)]
        start = torch.from_numpy(random.uniform(0, plan.length / JOINT_PERIODS, plan.batch_size))
        x = observe([periods(triple, plan.length) for triple in triples], plan.length, start).to(torch.complex64)
        error = torch.view_as_real(model(x) - x[:, 1:]).clamp(-CLIP, CLIP)
        optimizer.zero_grad()
        error.square().mean().backward()
        optimizer.step()
    return model


def generation_error(model: Moons, x: Tensor, contexts) -> list[float]:
    """Return, for each T of `contexts`, the mean |error| of AHEAD predictions after T observations of x [B,N,3]."""
    return [float((model.run_on(x[:, :t], AHEAD) - x[:, t : t + AHEAD]).abs().mean()) for t in contexts]


def separation(model: Moons) -> float:
    """Return the largest second-largest entry of a row of |W|, as a share of the row's largest; 0 for permutations."""
    return max(float((w / w.amax(1, keepdim=True)).sort(1).values[:, -2].max()) for w in model.magnitudes())


def analytic(contexts) -> dict[int, list[float]]:
    """Return generation errors of the analytic solution by heads: all matrices are the identity, in float64; periods 4,
    6 and 10, joint period 60."""
    x = observe(ANALYTIC_PERIODS, max(contexts) + AHEAD, torch.arange(8, dtype=torch.float64))
    errors = {}
    for heads in (1, 3):
        model = Moons(heads).double()
        for weight in model.parameters():
            weight.data = torch.view_as_real(torch.eye(3, dtype=torch.complex128))
        errors[heads] = generation_error(model, x, contexts)
    return errors


def run(folder: Path, plan: Plan, *, quiet: bool = False, minutes: float = math.inf) -> dict:
    """Train, score on the held-out moons and draw; return the numbers of results.json. No training begins after
    `minutes`; the same call continues."""
    report = Report(folder, dataclasses.replace(plan, seeds=1), quiet, minutes)  # more seeds are more parts
    moons = periods(HELD_OUT, plan.length)
    longest, joint = max(moons), plan.length / JOINT_PERIODS
    claimed = round(1.1 * longest)
    contexts = sorted({*range(plan.every, plan.length - AHEAD, plan.every), claimed})
    start = torch.linspace(0, joint, plan.sequences + 1, dtype=torch.float64)[:-1]
    x = observe(moons, plan.length, start).to(torch.complex64)

    def trained(heads: int, seed: int) -> dict:
        model = train(heads, plan, seed)
        weights = [w.tolist() for w in model.magnitudes()]
        return {"errors": generation_error(model, x, contexts), "apart": separation(model), "weights": weights}

    errors, apart, weights = {}, {}, {}
    for heads in (1, 3):
        for seed in range(plan.seeds):
            name = f"{heads} head{'s' * (heads > 1)}, seed {seed}"
            result = report.part(f"{heads} heads {seed}", functools.partial(trained, heads, seed))
            errors[name], apart[name], weights[name] = (result[key] for key in ("errors", "apart", "weights"))
            report.say(f"{name}: error {errors[name][contexts.index(claimed)]:.3f} after {claimed} observations")
    shown = [t for t in contexts if t in (contexts[0], claimed) or t % (plan.length // 8) < plan.every]
    held_out = ", ".join(f"{p:.1f}" for p in moons)
    title = f"Mean |error| of {AHEAD} free-running predictions after T observations; held-out periods {held_out}"
    rows = [[name, *(errors[name][contexts.index(t)] for t in shown), apart[name]] for name in errors]
    report.table(f"{title}, joint {joint:.1f}", ["network", *(f"T={t}" for t in shown), "off-entry"], rows)
    one, three = ([e[contexts.index(claimed)] for n, e in errors.items() if n.startswith(str(h))] for h in (1, 3))
    holds = max(three) < 0.5 * min(one)
    found = f"three heads at most {max(three):.3f}, one head at least {min(one):.3f}; under half: {holds}"
    report.say(f"T = 1.1 max(p) = {claimed}, before the joint period {joint:.0f}: {found}")
    exact_contexts = [4, 6, 10, 20, 40, 59, 61, 80]
    exact = analytic(exact_contexts)
    title = "The analytic solution (identity matrices, no training), periods 4, 6, 10, joint 60"
    rows = [[str(heads), *(f"{e:.1e}" for e in result)] for heads, result in exact.items()]
    report.table(title, ["heads", *(f"T={t}" for t in exact_contexts)], rows)
    draw_errors(report, contexts, errors, moons, joint)
    draw_weights(report, weights)
    results = {"plan": vars(plan), "periods": moons, "joint_period": joint, "contexts": contexts, "errors": errors}
    claim = {"context": claimed, "one_head": one, "three_heads": three, "holds": holds}
    results |= {"off_entries": apart, "claim": claim, "magnitudes": weights}
    return report.finish(results | {"analytic": {"contexts": exact_contexts, "errors": exact}})


def draw_errors(report: Report, contexts, errors: dict, moons, joint: float) -> None:
    """Draw figures 4 and 5, a panel a network."""
    figure, axes = report.figure("errors.png", 2, figsize=(11, 3.6), sharey=True)
    for axis, heads in zip(axes, (1, 3)):
        for name, curve in errors.items():
            if name.startswith(str(heads)):
                axis.plot(contexts, curve, label=name)
        for period in moons:
            axis.axvline(period, color="black", linewidth=0.8)
        axis.axvline(joint, color="red", linewidth=1.2)
        axis.set(title=f"{heads} head{'s' * (heads > 1)}", xlabel="observations (black: periods, red: joint period)")
        axis.legend()
    axes[0].set(ylabel=f"mean |error| of the next {AHEAD}", ylim=(0, 1.05 * max(map(max, errors.values()))))
    figure.save()


def draw_weights(report: Report, weights: dict) -> None:
    """Draw figure 6: |W_phi|, |W_psi|, |W_z| of three heads."""
    labels = (r"$W_\phi$", r"$W_\psi$", r"$W_z$")
    three = [(name, *pair) for name in weights if name.startswith("3") for pair in zip(labels, weights[name])]
    figure, axes = report.figure("weights.png", len(three), figsize=(2.0 * len(three), 2.4))
    for axis, (name, label, matrix) in zip(axes, three):
        axis.imshow(np.array(matrix), cmap="gray_r", vmin=0)
        axis.set(title=f"|{label}|", xticks=[], yticks=[], xlabel=name.split(", ")[1])
    figure.save()
