"""The choice of a shared prefix: 64 tokens from one of a few places in the library, judged on other documents.

A place may be much better than another: on two corpora the gain ranged from 0.01 to 0.13 nats per token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from retro_model.data.store import TokenStore
from retro_model.evaluation.scoring import document_rows
from retro_model.retrofit import retrofit

LENGTH = 64  # tokens of the prefix; the first is the attention sink
PLACES = 16  # half of them are beginnings of documents
JUDGED_TOKENS = 2048  # tokens of the windows on which places are judged
FEW, KEPT = 256, 3  # their first tokens, this many in all, choose the places that are judged on every second window


class Choice(NamedTuple):
    """A prefix and how it was chosen.

    tokens: the prefix; empty if no place is better than none. document: name of the document from which it was taken.
    first: index of its first token there. nats: loss per token with the best places, best first by the windows' first
    tokens, then without a prefix.
    """

    tokens: tuple[int, ...]
    document: str | None
    first: int
    nats: tuple[float, ...]

    def said(self) -> str:
        """Say the choice in a sentence."""
        if not self.nats:
            return "no prefix: the library has too few documents of a window's length"
        *places, none = self.nats
        if not self.tokens:
            return f"no prefix: with the best place the loss is {min(places):.3f} nats per token, without {none:.3f}"
        found = f"{len(self.tokens)} tokens from {self.document}, at token {self.first}"
        return f"{found}: {min(places):.3f} nats per token on other documents, without a prefix {none:.3f}"


def choose(decoder: nn.Module, store: TokenStore, *, window: int, seed: int = 0) -> Choice:
    """Choose the prefix under which windows of the library's other documents have the lowest loss.

    Most places are judged by the first tokens of the windows, which a prefix helps most.

    Nothing but the library is read, and nothing is retrieved. A library with fewer than two documents of a window
    length gets no prefix.

    Args:
        decoder: of the Hugging Face library; it is hooked as by `retrofit(neighbours="own")`, which changes no output.
        store: documents of the library.
        window: tokens of the windows.
    """
    bos = decoder.config.bos_token_id
    sink = bos if isinstance(bos, int) else 0  # first token of the prefix
    random, m = np.random.default_rng(seed), store.chunk_len
    # complete chunks of each document
    rows = [(first, end - (int(store.lengths[end - 1]) < m)) for first, end in document_rows(store)]
    chunks = -(-LENGTH // m)
    long_enough = [at for at, (first, end) in enumerate(rows) if end - first >= max(window // m, chunks)]
    drawn = random.permutation(long_enough)
    # no document has both a place and a window
    places = [int(at) for at in drawn[: min(PLACES, len(drawn) // 2)]]
    windows = drawn[len(places) : len(places) + max(2, JUDGED_TOKENS // window)]
    if not places:
        return Choice((), None, 0, ())
    judged = []
    for at in windows:
        first, end = rows[at]
        begin = random.integers(first, end - window // m, endpoint=True)
        judged.append(np.asarray(store.tokens[begin : begin + window // m]).reshape(-1))
    tokens = torch.from_numpy(np.stack(judged).astype(np.int64))
    found = []
    for number, at in enumerate(places):
        first, end = rows[at]
        begin = first if number % 2 == 0 else int(random.integers(first, end - chunks, endpoint=True))
        text = np.asarray(store.tokens[begin : begin + chunks]).reshape(-1)
        text = text[1:] if text[0] == sink else text
        found.append(((sink, *text[: LENGTH - 1].tolist()), store.documents[at].name, (begin - first) * m))
    first_tokens = tokens[:, : 1 + FEW // len(tokens)]
    found = [*sorted(found, key=lambda place: _loss(decoder, first_tokens, place[0]))[:KEPT], ((), None, 0)]
    nats = tuple(round(_loss(decoder, tokens[::2], prefix), 4) for prefix, *_ in found)
    return Choice(*found[int(np.argmin(nats))], nats)


@torch.no_grad()
def _loss(decoder: nn.Module, tokens: torch.Tensor, prefix: tuple[int, ...]) -> float:
    """Return the mean loss in nats per token of windows [W,N] after a prefix, without their first tokens."""
    model = retrofit(decoder, neighbours="own", prefix=prefix).eval()
    counted = torch.ones_like(tokens, dtype=torch.bool)
    losses = [model(*part[:1], loss_mask=part[1]).total for part in zip(tokens.split(8), counted.split(8))]
    return float(sum(losses)) / tokens[:, 1:].numel()
