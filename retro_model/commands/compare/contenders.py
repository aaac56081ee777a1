"""The contenders of `compare`, as one table: everything that a user can do with a decoder and a library."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from retro_model import evaluation
from retro_model.evaluation import knn_lm
from retro_model.retrofit import retrofit

from ..retrofit.fitting import changes, fit
from ..retrofit.options import RATES, Fit, Sizes
from ..retrofit.prefix import choose
from ..retrofit.prepared import PreparedLibrary, read_decoder, stream
from .options import CONTENDERS, DATASTORE_TOKENS, RANK


@dataclass(frozen=True)
class Setting:
    """Inputs of the contenders.

    folder: folder of the trained contenders. datastore_tokens: size of kNN-LM's datastore. layers: layers of own
    attention that attend neighbours; None: all. states: folder in which contenders and later calls share the states of
    neighbours; None: states are not saved.
    """

    decoder_folder: Path
    library: PreparedLibrary
    sizes: Sizes
    fit: Fit
    folder: Path
    datastore_tokens: int = DATASTORE_TOKENS
    layers: tuple[int, ...] | None = None
    states: Path | None = None
    show: Callable[[str], None] = print

    @functools.cached_property
    def decoder(self) -> nn.Module:
        """Decoder of all contenders except `new`, whose layers leave hooks in the decoder."""
        return read_decoder(self.decoder_folder)

    @functools.cached_property
    def near(self) -> np.ndarray:
        """The neighbours of the held-out chunks that models are given."""
        return self.library.neighbours[:, : self.sizes.neighbours]

    @functools.cached_property
    def far(self) -> np.ndarray:
        """Mask of the neighbours that own attention does not read."""
        return self.library.far(self.sizes)

    @functools.cached_property
    def prefix(self) -> tuple[int, ...]:
        """Shared prefix, chosen on the library alone. It is kept in the folder."""
        path = self.folder / "prefix.json"
        if not path.exists():
            sink = self.decoder.config.bos_token_id
            store, sink = self.library.database.store, sink if isinstance(sink, int) else 0
            chosen = choose(self.decoder, store, window=self.sizes.window, sink=sink, seed=self.fit.seed)
            path.write_text(json.dumps(chosen._asdict()))
            self.show(f"  {chosen.said()}")
        return tuple(json.loads(path.read_text())["tokens"])

    @property
    def windows(self) -> dict[str, int]:
        return {"window": self.sizes.window, "stride": self.sizes.stride}


class Contender(NamedTuple):
    """A way to score the held-out documents.

    score: scores some held-out documents with given neighbours [chunks,K]. made: facts of the training. encode: encodes
    neighbours [S,R] ahead of the score and returns how many were not cached; None: nothing is encoded ahead. far: mask
    [chunks,K] of neighbours that the contender is not given; None: it is given all. seconds: time spent so far, by
    part; see `OwnAttention`.
    """

    score: Callable[[np.ndarray, Sequence[int] | None], evaluation.Scores]
    made: dict
    encode: Callable[[Tensor], int] | None = None
    far: np.ndarray | None = None
    seconds: Mapping[str, float] = MappingProxyType({})


def _decoder(s: Setting, prefix: bool) -> nn.Module:
    """Return the decoder, or a decoder that reads the shared prefix before every text."""
    return retrofit(s.decoder, neighbours="own", prefix=s.prefix) if prefix else s.decoder


def alone(s: Setting, times: int = 1, prefix: bool = False) -> Contender:
    """The decoder without retrieval. times: factor of windows and strides; the number of computed tokens stays."""
    model, sizes = _decoder(s, prefix), {name: times * size for name, size in s.windows.items()}
    scored = functools.partial(evaluation.score, model, s.library.held_out, **sizes)
    return Contender(lambda near, documents: scored(documents=documents), sizes)


def in_context(s: Setting, prefix: bool = False) -> Contender:
    sizes = {"window": s.sizes.window, "stride": s.sizes.chunk_len, "k": s.sizes.neighbours}
    scored = functools.partial(evaluation.score_in_context, _decoder(s, prefix), s.library.held_out, **sizes)
    return Contender(lambda near, documents: scored(near, s.library.database, documents=documents), sizes)


def knn(s: Setting) -> Contender:
    """kNN-LM over the documents of the library that supply most of the neighbours. Its control is `shuffled`."""
    library, model = s.library, s.decoder
    documents = suppliers(library, s.sizes.neighbours, s.datastore_tokens)
    tokens = sum(library.database.store.documents[number].num_tokens for number in documents)
    s.show(f"  datastore: {tokens:,} tokens of {len(documents)} documents")
    datastore = knn_lm.TokenDatastore.build(model, library.database.store, documents=documents, **s.windows)
    control = datastore.shuffled()

    def score(near: np.ndarray, documents: Sequence[int] | None) -> evaluation.Scores:
        found = datastore if near is s.near else control
        return knn_lm.score_tuned(model, found, library.held_out, documents=documents, **s.windows)

    return Contender(score, {"datastore_contexts": len(datastore.keys), "datastore_documents": len(documents)})


def suppliers(library: PreparedLibrary, k: int, most_tokens: int) -> list[int]:
    """Return the documents that hold most of the nearest k neighbours, at most `most_tokens` tokens of them."""
    found = library.database.document_of(library.neighbours[:, :k])
    numbers, counts = np.unique(found[found >= 0], return_counts=True)
    entries, taken, total = library.database.store.documents, [], 0
    for number in numbers[np.argsort(-counts, kind="stable")].tolist():
        if not taken or total + entries[number].num_tokens <= most_tokens:
            taken.append(number)
            total += entries[number].num_tokens
    return taken


def retrofitted(
    s: Setting,
    attention: str,
    trained: bool = True,
    rank: int = 0,
    every: bool = False,
    prefix: bool = False,
) -> Contender:
    """The decoder with RETRO's new layers, or the decoder that attends neighbours with its own attention.

    rank, prefix: options of own attention. every: attend dissimilar neighbours too.
    """
    torch.manual_seed(s.fit.seed)
    own = attention == "own"
    decoder = s.decoder if own else read_decoder(s.decoder_folder)
    layers = s.layers if own else None
    options = changes(attention, s.sizes, decoder.config.num_hidden_layers, layers, rank)
    model = retrofit(decoder, **options | ({"prefix": s.prefix} if prefix else {}))
    if own and s.states is not None and not s.states.exists():
        count, each = len(np.setdiff1d(s.near, -1)), model.neighbour_bytes() / 2**20
        all_of_them = f"at most {count * each:,.0f} MB for held-out chunks, and more for training"
        s.show(f"  states of neighbours are kept in {s.states}: {each:.1f} MB each, {all_of_them}")
    keeping = model.keeping(KEPT_BYTES, s.states) if own else contextlib.nullcontext()
    kept, facts = keeping.__enter__(), {}  # the cache lives as long as the contender
    if trained:
        rate = s.fit.max_lr if own and not rank else RATES["low-rank" if rank else attention]
        how = dataclasses.replace(s.fit, max_lr=rate, windows=s.fit.windows if own else None)
        folder = s.folder / f"{attention}-{rank}{'-prefix' * prefix}-{how.seed}"
        batches = functools.partial(stream, s.library, s.sizes, how)
        facts = fit(model, batches, how, s.sizes, folder, s.show)
        facts["trained_numbers"] = sum(p.numel() for p in model.parameters() if p.requires_grad)

    def score(near: np.ndarray, documents: Sequence[int] | None) -> evaluation.Scores:
        assert keeping is not None  # a reference: without it the cache would end here
        return evaluation.score(model, s.library.held_out, near, s.library.database, documents=documents, **s.windows)

    def encode(neighbours: Tensor) -> int:
        before = kept.read
        model.encode(neighbours)
        return kept.read - before

    return Contender(score, facts, encode, None if every else s.far, model.seconds) if own else Contender(score, facts)


MAKERS: dict[str, Callable[[Setting], Contender]] = {
    "alone": alone,
    "alone+prefix": functools.partial(alone, prefix=True),
    "longer": functools.partial(alone, times=2),
    "knn": knn,
    "new": functools.partial(retrofitted, attention="new"),
    "own-all": functools.partial(retrofitted, attention="own", trained=False, every=True),
    "own": functools.partial(retrofitted, attention="own", trained=False),
    "own+prefix": functools.partial(retrofitted, attention="own", trained=False, prefix=True),
    "own-gates": functools.partial(retrofitted, attention="own"),
    "own-gates+prefix": functools.partial(retrofitted, attention="own", prefix=True),
    "own-lora": functools.partial(retrofitted, attention="own", rank=RANK),
    "in-context": in_context,
    "in-context+prefix": functools.partial(in_context, prefix=True),
}


def decoder_tokens(s: Setting, name: str, documents: int, random_documents: int) -> float:
    """Estimate the number of tokens that the decoder computes for a contender, with the training."""
    sizes, read = s.sizes, s.sizes.neighbours * s.sizes.passage_chunks  # neighbours of a chunk, in chunks
    passes = documents + (0 if name in RETRIEVE_NOTHING else random_documents)
    if name.startswith("in-context"):
        each = sizes.window / sizes.chunk_len + read
    else:
        each = sizes.window / sizes.stride + read * name.startswith("own")
    scored = each * passes / len(s.library.held_out.documents) * s.library.facts["held_out_tokens"]
    trained = s.fit.steps * s.fit.batch_size * sizes.window * (3 + read) if name in TRAINED else 0
    return scored + trained + (s.datastore_tokens * sizes.window / sizes.stride if name == "knn" else 0)


KEPT_BYTES = 2**31  # limit for neighbours' states in memory
OWN = tuple(name for name in CONTENDERS if name.startswith("own"))
TRAINED = ("new", *(name for name in OWN if name.startswith(("own-gates", "own-lora"))))
RETRIEVE_NOTHING = ("alone", "alone+prefix", "longer")  # contenders without a control
