"""Reader of a model folder: it reads texts with the model and the neighbours of the library, and writes."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from retro_model import checkpoint, generate
from retro_model.base import checks
from retro_model.data.database import ChunkDatabase
from retro_model.data.embed import HashedTfidf
from retro_model.data.store import TokenStore
from retro_model.data.tokens import BOS, Tokenizer
from retro_model.retro import Retro, RetroConfig

from . import folder as folders
from .documents import Documents
from .reading import TextReading, bits, sources, token_texts

MOST_NEIGHBOURS = 10
MOST_NEW_TOKENS = 128
LONGEST_TEXT = 64 << 10  # characters
LEAST_MATCH = 0.1


@dataclass(frozen=True)
class Options:
    """Options of a reading. k: neighbours of a chunk, or passages in a question's prompt. temperature, new_tokens and
    seed are for `write`. least: match with a question below which a passage is not read, see `QuestionSearch`.
    """

    k: int = 2
    retrieval: bool = True
    temperature: float = 0.7
    new_tokens: int = 64
    seed: int = 0
    least: float = LEAST_MATCH

    def __post_init__(self) -> None:
        for name, low, high in (("k", 1, MOST_NEIGHBOURS), ("new_tokens", 1, MOST_NEW_TOKENS), ("seed", 0, 2**31)):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ValueError(f"{name}: expected an integer from {low} to {high}; got {value!r}")
        if type(self.retrieval) is not bool:
            raise ValueError(f"retrieval: expected true or false; got {self.retrieval!r}")
        if type(self.least) not in (int, float) or not 0 <= self.least <= 1:
            raise ValueError(f"least: expected a number from 0 to 1; got {self.least!r}")
        if type(self.temperature) not in (int, float) or not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature: expected a number from 0 to 2; got {self.temperature!r}")


class Reader:
    """Open model folder of a `Retro`.

        reader = reader.open_folder("retrofit-out")
        reading = reader.score(reader.passage(0), Options(k=2))
        print(reading.per_byte(reading.off) - reading.per_byte(reading.on))

    Attributes:
        folder: contents of `model.json`. model, tokenizer, held_out: its parts.
        library: documents to retrieve from.
        passages: facts of the held-out passages, a window each. order: their numbers, first those that resemble the
            library most: they gain most. start: the first of them.
    """

    without = "the same model, retrieval off"  # name of the reading without retrieval
    asks = False  # whether the model answers questions, see `question`
    stop_token: int | None = None
    bos_id = BOS  # token that begins texts, if the folder says that one does

    def __init__(self, folder: folders.ModelFolder, device: str = "cpu", model: nn.Module | None = None) -> None:
        self.folder, self.device = folder, checks.usable_device(device)
        self.tokenizer = self._tokenizer()
        self.held_out = TokenStore(folder.part("held_out"))
        self.model = (self._model() if model is None else model).to(self.device).eval()
        store, embedder = TokenStore(folder.part("store"), verify=False), HashedTfidf.load(folder.part("embedder"))
        keys = ChunkDatabase.open(folder.part("keys"), store, embedder, verify=False).searcher.keys
        options = {name: folder.facts[name] for name in ("least_similarity", "passage_chunks") if name in folder.facts}
        self.library = Documents(store, keys, embedder, self.tokenizer, **options)
        self.neighbours = folder.facts.get("neighbours", 2)
        self.passages = self._passages()
        self.order = self._order()
        self.start = self.order[0] if self.order else 0

    def _order(self) -> list[int]:
        """Return the numbers of the passages: full windows before tails, then by the chunks' mean similarity."""
        m, found = self.held_out.chunk_len, []
        for passage in self.passages:
            ids = self.passage(passage["id"])
            near = self.library.search(ids[: len(ids) // m * m].reshape(-1, m), 1)[1]
            found.append((passage["tokens"] < self.folder.window // 2, -float(near.mean()) if near.size else 0.0))
        return sorted(range(len(found)), key=found.__getitem__)

    def _tokenizer(self):
        return Tokenizer.load(self.folder.part("tokenizer"))

    def _model(self) -> nn.Module:
        """Return the model of the folder's checkpoint."""
        path = self.folder.part("model")
        model = Retro(RetroConfig.from_dict(checkpoint.read_state(path)["config"]))
        checkpoint.load(path, model)
        return model

    def _passages(self) -> list[dict]:
        """Return document, first chunk and line of each window."""
        m, window, passages = self.held_out.chunk_len, self.folder.window, []
        per_window = max(1, window // m)
        for number, entry in enumerate(self.held_out.documents):
            ids, line = self.held_out.document_tokens(number), 1
            for first in range(0, entry.num_chunks, per_window):
                passage = {"id": len(passages), "document": number, "name": entry.name, "first_chunk": first}
                passages.append(passage | {"line": line, "tokens": min(window, len(ids) - first * m)})
                line += self.tokenizer.decode_bytes(ids[first * m : (first + per_window) * m]).count(b"\n")
        return passages

    def passage(self, number: int) -> np.ndarray:
        """Return the token ids of a passage. Raises: ValueError for an unknown number."""
        if type(number) is not int or not 0 <= number < len(self.passages):
            raise ValueError(f"passage: expected a number from 0 to {len(self.passages) - 1}; got {number!r}")
        passage = self.passages[number]
        first = passage["first_chunk"] * self.held_out.chunk_len
        return self.held_out.document_tokens(passage["document"])[first : first + self.folder.window]

    def encode(self, text: str) -> np.ndarray:
        """Return the first `window` token ids of a user's text. Raises: ValueError for an empty or too long text."""
        if len(text) > LONGEST_TEXT:
            raise ValueError(f"text: expected at most {LONGEST_TEXT:,} characters; got {len(text):,}")
        ids = self.tokenizer.encode(text)[: self.folder.window - 1]
        if not len(ids) or not text.strip():
            raise ValueError("text: expected some text; got none")
        return np.concatenate([[self.bos_id], ids]) if self.folder.facts.get("bos") else np.asarray(ids)

    def find(self, text: str, options: Options) -> dict:
        """Return the passages that resemble a question, as the page shows them: see `RetrofitReader.find`."""
        raise ValueError(f"question: expected a model that was taught to answer; got a {self.folder.kind} model")

    def answer(self, text: str, options: Options, told: Callable[[str], None] = lambda text: None) -> dict:
        """Answer a question: see `RetrofitReader.answer`."""
        return self.find(text, options)

    @torch.no_grad()
    def score(self, ids: np.ndarray, options: Options) -> TextReading:
        """Return the cost of each token with retrieval and without, and the retrieved neighbours."""
        m = self.model.config.chunk_len
        chunks = ids[: len(ids) // m * m].reshape(-1, m)
        hits, near = np.zeros((0, options.k), np.int64), np.zeros((0, options.k))
        if len(chunks) and options.retrieval:
            hits, near = self.library.search(chunks, options.k)
        neighbours, mask = self.library.values(hits)
        to = functools.partial(torch.as_tensor, device=self.device)

        def cost(*found: np.ndarray) -> np.ndarray:
            read = zip(checks.RETRIEVED, found if len(chunks) else ())
            return bits(self.model(to(ids)[None], **{name: to(array)[None] for name, array in read})[0], to(ids))

        on = off = cost()
        random = None
        if options.retrieval:
            on, random = cost(neighbours, mask), cost(*self.library.values(self.library.drawn(hits)))
        cards: list[list[dict]] = [[] for _ in hits]
        for c, k in np.argwhere(hits >= 0):
            card = self.library.place(int(hits[c, k]))._asdict() | {"score": round(float(near[c, k]), 3)}
            card["texts"] = token_texts(self.tokenizer.decode_bytes, neighbours[c, k][mask[c, k]])
            cards[c].append(card | {"found": int(mask[c, k, :m].sum())})
        texts = token_texts(self.tokenizer.decode_bytes, ids)
        lengths = np.asarray(self.tokenizer.byte_lengths)[ids]
        extra = {"library": self.library_state()}
        reading = TextReading(ids, texts, on, off, lengths, m, cards, [None] * len(ids), extra, random)
        reading.sources = sources(ids, neighbours, mask, reading.blank, m)
        return reading

    def _retrieve(self, k: int, chunks: Tensor) -> tuple[Tensor, ...]:
        """Return k neighbours of each chunk, as `generate` takes them."""
        ids, _ = self.library.search(chunks.cpu().numpy(), k)
        return tuple(torch.from_numpy(part) for part in self.library.values(ids))

    def write(self, ids: np.ndarray, options: Options) -> tuple[TextReading, str]:
        """Continue a text; return its reading, and the continuation by the same seed without retrieval."""
        ids = ids[: max(1, self.folder.window - options.new_tokens)]
        prompt, written = torch.as_tensor(ids, device=self.device)[None], []
        for on in (options.retrieval, False):
            generator = torch.Generator(self.device).manual_seed(options.seed)
            retrieve = functools.partial(self._retrieve, options.k) if on else None
            how = {"temperature": options.temperature, "top_p": 0.95, "stop_token": self.stop_token}
            made = generate(self.model, prompt, options.new_tokens, generator=generator, retrieve=retrieve, **how)
            written.append(made[0].cpu().numpy())
        reading = self.score(written[0], options)
        # the model's own words are likely to it: their cost does not measure retrieval
        reading.extra |= {"prompt_tokens": len(ids), "bits_per_byte": None}
        return reading, "".join(token_texts(self.tokenizer.decode_bytes, written[1][len(ids) :]))

    def about(self) -> dict:
        """Return the facts of the model that the page shows before a reading."""
        return {
            "kind": self.folder.kind,
            "title": self.folder.title,
            "weights": sum(p.numel() for p in self.model.parameters()),
            "window": self.folder.window,
            "without": self.without,
            "facts": self.folder.facts,
            "passages": [self.passages[number] for number in self.order],
            "asks": self.asks,
            "start": self.start,
            "most_neighbours": MOST_NEIGHBOURS,
            "most_new_tokens": MOST_NEW_TOKENS,
            "neighbours": self.neighbours,
            "library": self.library_state(),
        }

    def library_state(self) -> dict:
        """Return the numbers of documents and chunks, and the changes."""
        documents, forgotten = self.library.documents, self.library.forgotten
        added = range(len(self.library.store.documents), len(documents))
        named = lambda numbers: [{"document": n, "name": documents[n].name} for n in numbers]  # noqa: E731
        return {
            "documents": len(documents) - len(forgotten),
            "chunks": len(self.library.store),
            "forgotten": named(forgotten),
            "added": named(n for n in added if n not in forgotten),
        }


def open_folder(path: str | Path, device: str = "cpu", model: nn.Module | None = None) -> Reader:
    """Return the reader of a model folder. model: the folder's, if it is in memory.

    Raises: FileNotFoundError, ValueError naming the missing or wrong part.
    """
    folder = folders.load(path)
    # transformers is imported for its own folders alone
    made = importlib.import_module(f"{__package__}.retrofit").RetrofitReader if folder.kind == "retrofit" else Reader
    return made(folder, device, model)
