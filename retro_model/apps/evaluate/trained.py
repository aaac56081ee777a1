"""Open the folder of a RETRO demonstration, for the commands that go on from it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

from retro_model import Retro, RetroConfig, checkpoint
from retro_model.apps.demo.corpus import Corpus
from retro_model.apps.demo.plan import Plan
from retro_model.data.database import ChunkDatabase
from retro_model.data.embed import HashedTfidf
from retro_model.data.neighbours import open_neighbours
from retro_model.data.store import TokenStore
from retro_model.data.tokens import Tokenizer


class Trained(NamedTuple):
    """Both models in evaluation mode, what they were trained on and scored on, and the sizes of the run."""

    retro: Retro
    baseline: Retro
    corpus: Corpus
    plan: Plan


def open_demo(folder: Path) -> Trained:
    """Raises: FileNotFoundError, ValueError naming the file; SystemExit for a folder of another command."""
    if not (folder / "results.json").exists():
        advice = ""
        if (folder / "retrofit.json").exists():
            advice = "; of a retrofit's decoder: retro-model compare DECODER --contenders alone knn own"
        sys.exit(f"{folder}: expected a folder that retro-model demo left, with its results.json{advice}")
    results = json.loads((folder / "results.json").read_text())
    models = []
    for name in ("retro", "baseline"):
        model = Retro(RetroConfig.from_dict(checkpoint.read_state(folder / name)["config"]))
        checkpoint.load(folder / name, model)
        models.append(model.eval())
    store = TokenStore(folder / ("database" if (folder / "database").exists() else "all"))
    database = ChunkDatabase.open(folder / "embeddings", store, HashedTfidf.load(folder / "embedder.npz"))
    parts = {name: TokenStore(folder / name) for name in ("train", "validation")}
    neighbours = {
        f"{name}_neighbours": open_neighbours(folder / f"{name}-neighbours", part, database)
        for name, part in parts.items()
    }
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    corpus = Corpus(tokenizer, database, **parts, **neighbours, facts=results["corpus"])
    return Trained(*models, corpus, Plan(**results["plan"]))
