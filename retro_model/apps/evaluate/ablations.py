"""Ablations of RETRO: small models that lack one part, trained as the demonstration trains and scored on its
held-out text. Source: appendix D of arXiv 2112.04426.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from retro_model import RetroConfig, evaluation
from retro_model.apps.demo.command import fit
from retro_model.data.parts import OnlyPart

from .trained import Trained

WHOLE = "RETRO"


def variants(demo: Trained) -> dict[str, tuple[RetroConfig, object]]:
    """Name -> sizes and the database that the model is shown."""
    config, database = demo.retro.config, demo.corpus.database
    part = config.replace(neighbour_len=config.chunk_len)
    return {
        WHOLE: (config, database),
        "encoder not conditioned": (config.replace(encoder_cross_layers=()), database),
        "N alone": (part, OnlyPart(database, "N")),
        "F alone": (part, OnlyPart(database, "F")),
    }


def ablations(
    demo: Trained, steps: int, folder: Path, *, seed: int = 0, documents: int | None = None, report=print
) -> dict[str, dict]:
    """Bits per byte after `steps` steps on the same batches, and the difference from the whole RETRO.

    folder: keeps each variant's scores: killed and called again it goes on.
    Returns: {name: {"bits_per_byte": bpb, "minus RETRO": (difference, 2.5%, 97.5% over documents)}}.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scores, found = {}, {}
    for name, (config, shown) in variants(demo).items():
        path = folder / f"{name.replace(' ', '-')}-{steps}-{seed}-{documents}.npz"
        if not path.exists():
            _train_and_score(demo, config, shown, steps, seed, documents, path)
        with np.load(path) as kept:
            scores[name] = evaluation.Scores(
                **{field.name: kept[field.name] for field in dataclasses.fields(evaluation.Scores)}
            )
        gap = evaluation.bootstrap(scores[name], scores[WHOLE], demo.corpus.validation)
        found[name] = {"bits_per_byte": evaluation.bits_per_byte(scores[name]), f"minus {WHOLE}": gap}
        report(
            f"{name}: {found[name]['bits_per_byte']:.4f} bits per byte after {steps} steps, minus {WHOLE} "
            f"{gap[0]:+.4f} (95% over documents: {gap[1]:+.4f} to {gap[2]:+.4f})"
        )
    return found


def _train_and_score(
    demo: Trained, config: RetroConfig, shown, steps: int, seed: int, documents: int | None, path: Path
) -> None:
    plan, held_out = demo.plan, demo.corpus.validation
    plan = dataclasses.replace(plan, steps=steps, warmup_steps=min(plan.warmup_steps, steps // 10))
    model, _ = fit(config, demo.corpus, plan, seed, "cpu", path.stem, quiet=False, shown=shown)
    scores = evaluation.score(
        model,
        held_out,
        demo.corpus.validation_neighbours[:, : plan.neighbours],
        shown,
        window=plan.window,
        stride=plan.stride,
        documents=None if documents is None else range(min(documents, len(held_out.documents))),
    )
    part = path.with_suffix(".part.npz")
    np.savez(part, **dataclasses.asdict(scores))
    part.replace(path)
