"""The contenders of `compare`, as one table: everything that a user can do with a decoder and a library."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from retro_model import evaluation
from retro_model.retrofit import retrofit

from ..options import STEPS, Sizes
from ..retrofit.copying import fit_copying
from ..retrofit.fitting import fit
from ..retrofit.prefix import choose
from ..retrofit.prepared import PreparedLibrary, lengths, read_decoder, show_line, stream

KEPT_BYTES = 2**31  # limit for neighbours' states in memory


@dataclass(frozen=True)
class Setting:
    """Inputs of the contenders. folder: folder of the trained contenders. documents: number that is scored."""

    decoder_folder: Path
    library: PreparedLibrary
    sizes: Sizes
    folder: Path
    documents: int
    steps: int = STEPS
    seed: int = 0
    show: Callable[[str], None] = show_line

    @functools.cached_property
    def decoder(self):
        return read_decoder(self.decoder_folder)

    @functools.cached_property
    def near(self) -> np.ndarray:
        """The neighbours of the held-out chunks, [chunks,K]."""
        return self.library.neighbours[:, : self.sizes.neighbours]

    @functools.cached_property
    def similar(self) -> np.ndarray:
        """The neighbours that own attention reads, see `PreparedLibrary.similar`."""
        return self.library.similar(self.sizes)

    @functools.cached_property
    def prefix(self) -> tuple[int, ...]:
        """Shared prefix, chosen on the library alone. It is kept in the folder."""
        path = self.folder / f"prefix-{self.seed}.json"
        if not path.exists():
            chosen = choose(self.decoder, self.library.database.store, window=self.sizes.window, seed=self.seed)
            path.write_text(json.dumps(chosen._asdict()))
            self.show(f"  {chosen.said()}")
        return tuple(json.loads(path.read_text())["tokens"])

    @property
    def windows(self) -> dict[str, int]:
        return {"window": self.sizes.window, "stride": self.sizes.stride}


class Contender(NamedTuple):
    """A way to score the held-out documents.

    score: scores them with given neighbours [chunks,K]. near: the neighbours that were retrieved for it; None: it
    retrieves nothing, so that it has no control. made: facts of the training.
    """

    score: Callable[[np.ndarray | None], evaluation.Scores]
    near: np.ndarray | None
    made: dict


def _decoder(s: Setting, prefix: bool) -> nn.Module:
    """Return the decoder, or a decoder that reads the shared prefix before every text."""
    return retrofit(s.decoder, neighbours="own", prefix=s.prefix) if prefix else s.decoder


def alone(s: Setting, times: int = 1, prefix: bool = False) -> Contender:
    """The decoder without retrieval. times: factor of windows and strides; the number of computed tokens stays."""
    sizes = {name: times * size for name, size in s.windows.items()} | {"documents": range(s.documents)}
    scored = functools.partial(evaluation.score, _decoder(s, prefix), s.library.held_out, **sizes)
    return Contender(lambda near: scored(), None, {})


def in_context(s: Setting, prefix: bool = False) -> Contender:
    sizes = {"window": s.sizes.window, "stride": s.sizes.chunk_len, "k": s.sizes.neighbours}
    scored = functools.partial(evaluation.score_in_context, _decoder(s, prefix), s.library.held_out, **sizes)
    return Contender(lambda near: scored(near, s.library.database, documents=range(s.documents)), s.near, {})


def own(s: Setting, trained: bool = True, prefix: bool = False, both: bool = False) -> Contender:
    """The decoder that attends neighbours with its own attention.

    trained: train the bias and the scale of each head. both: read complete chunks twice, and copy from neighbours if
    the fit keeps copying.
    """
    torch.manual_seed(s.seed)
    options = {"neighbours": "own", "second_look": both, **lengths(s.sizes)} | ({"prefix": s.prefix} if prefix else {})
    model, facts = retrofit(s.decoder, **options), {}
    if trained:
        settings = dataclasses.asdict(s.sizes) | {
            "seed": s.seed,
            "second_look": both,
            "prefix": list(options.get("prefix", ())),
        }
        folder = s.folder / f"own{'-prefix' * prefix}{'-second' * both}-{s.seed}"
        with model.keeping(KEPT_BYTES):
            facts = fit(model, functools.partial(stream, s.library, s.sizes, s.seed), s.steps, settings, folder, s.show)
    if both:
        copier = retrofit(s.decoder, **options, copying=True)
        fitted = fit_copying(copier, model.added_state_dict(), s.library, s.sizes, s.seed)
        s.show(f"  {fitted.said()}")
        facts["copying"] = fitted._asdict()
        model = copier if fitted.kept else model
    scored = functools.partial(evaluation.score, model, s.library.held_out, documents=range(s.documents), **s.windows)
    return Contender(lambda near: scored(near, s.library.database), s.similar, facts)


MAKERS: dict[str, Callable[[Setting], Contender]] = {
    "alone": alone,
    "alone+prefix": functools.partial(alone, prefix=True),
    "longer": functools.partial(alone, times=2),
    "own": functools.partial(own, trained=False),
    "own-gates": own,
    "own-gates+prefix": functools.partial(own, prefix=True),
    "own-gates+prefix+both": functools.partial(own, prefix=True, both=True),
    "in-context": in_context,
    "in-context+prefix": functools.partial(in_context, prefix=True),
}
