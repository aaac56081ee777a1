"""The fit of copying: three numbers, on windows of the library's own text."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from retro_model.retrofit import OwnAttention
from retro_model.retrofit.own_copy import NEVER, UNSEEN
from retro_model.training import gather

from ..options import Sizes
from .prepared import SPARE, PreparedLibrary, Searched, spread

FITTED_TOKENS, FEWEST_WINDOWS, AT_ONCE = 3072, 12, 4
LEAST_GAIN = 0.005  # nats per token; copying that saves less is left out


class Fitted(NamedTuple):
    """The outcome of a fit.

    gain: nats per token that copying saves on the windows. numbers: see `Copying.numbers`. tokens: tokens of the
    windows.
    """

    gain: float
    numbers: tuple[float, ...]
    tokens: int

    @property
    def kept(self) -> bool:
        return self.gain >= LEAST_GAIN

    def said(self) -> str:
        """Say the outcome in a sentence."""
        outcome = "kept" if self.kept else f"left out, because {LEAST_GAIN} are expected"
        return f"copying saves {self.gain:.4f} nats per token of the library's own text: {outcome}"


@torch.no_grad()
def fit_copying(
    copier: OwnAttention, gates: dict[str, Tensor], library: PreparedLibrary, sizes: Sizes, seed: int
) -> Fitted:
    """Fit the numbers and the centre of a model that copies.

    The windows are drawn at random, at most one per document. Neighbours are those that own attention reads, from other
    documents.

    gates: trained weights of the same model without copying.
    """
    database = library.database
    store, near = database.store, Searched(database, sizes.neighbours + SPARE, sizes.least_similarity)
    count = min(max(FEWEST_WINDOWS, FITTED_TOKENS // sizes.window), len(store.documents))
    # any neighbour will do: windows with similar neighbours alone would overestimate the gain
    firsts = spread(store, Searched(database, near.shape[1]), sizes.window, count, seed + 1)
    copier.load_state_dict(gates, strict=False)
    copying, calls, tokens = copier.eval().copying, [], 0
    for part in () if firsts is None else np.split(firsts, range(AT_ONCE, len(firsts), AT_ONCE)):
        rows = part[:, None] + np.arange(sizes.window // store.chunk_len)
        batch = gather(store, rows, near, database, k=sizes.neighbours).to(copier.device)
        tokens += int(batch.real[:, 1:].sum())
        with copying.register_forward_pre_hook(functools.partial(_keep, calls, batch)):
            copier(**batch.inputs)
    if not calls:
        return Fitted(0.0, tuple(copying.numbers.tolist()), tokens)
    copying.centre.copy_(torch.cat([at.states[at.since < NEVER] for *_, at, _ in calls]).mean(0))
    columns = []
    for nats, hidden, entries, batch in calls:
        c, right = copying.similarity(hidden, entries)[:, :-1], entries.tokens[:, None] == batch.tokens[:, 1:, None]
        counted = (c > UNSEEN).any(-1) & batch.real[:, 1:]
        columns.append([t[counted] for t in (nats, c, right)])
    nats, c, right = (torch.cat(column) for column in zip(*columns))
    gain = copying.fit(nats, c, right) * len(nats) / tokens
    return Fitted(gain, tuple(copying.numbers.tolist()), tokens)


def _keep(calls: list, batch, copying: torch.nn.Module, given: tuple) -> None:
    """Keep the losses of the tokens before copying, the last states and the entries of a call."""
    logits, hidden, entries = given
    nats = F.cross_entropy(logits[:, :-1].mT, batch.tokens[:, 1:], reduction="none")
    calls.append((nats, hidden, entries, batch))
