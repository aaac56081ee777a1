"""Questions to a library: the passages that resemble a question, and prompts for a decoder that attends them.

A question is shorter than a chunk, so it would retrieve nothing. If it begins behind the first chunk (`reading_chat`),
its own tokens attend the passages, and so does the answer. No token of the question is predicted, so nothing leaks. The
search sees the question alone, without the chat template.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch

from .documents import FORGOTTEN, Documents

PIECE = 4  # characters of a word's pieces: inflected forms share most of theirs
_COMMON = (
    "a an and are at be been by can did do does for from had has have how i in is it its long many much must my not "
    "of often on or our should that the there this to was we were what when where which who whom whose why will with "
    "would you"
)
COMMON = frozenset(_COMMON.split())  # words that say nothing about the subject of a question
Encode = Callable[[Sequence[str]], np.ndarray]  # texts -> unit vectors float32 [n,dim]


def pieces(text: str) -> list[str]:
    """Return the pieces of four characters of a text's words, without common words.

    pieces("the boilers") == ["<boi", "boil", "oile", "iler", "lers", "ers>"]
    """
    words = (f"<{word}>" for word in re.findall(r"\w+", text.lower()) if word not in COMMON)
    return [word[i : i + PIECE] for word in words for i in range(max(1, len(word) - PIECE + 1))]


class QuestionSearch:
    """Search for the passages of a library that resemble a question.

    The match of a passage is the share of the question's pieces of words that it holds, each piece weighted by its
    rarity in the library: from 0 to 1. An encoder adds the cosine of question and passage, and the match is
    their mean.

    library: the documents. encode: encoder of texts, for words that differ in form; None: words alone.
    """

    def __init__(self, library: Documents, encode: Encode | None = None) -> None:
        self.library, self.encode = library, encode
        self._pieces: list[frozenset[str]] = []
        self._vectors = np.zeros((0, 0), np.float32)
        self._counts: Counter = Counter()

    def _read(self) -> np.ndarray:
        """Read the chunks that were added since the last call; return the document of each chunk, or `FORGOTTEN`."""
        library = self.library
        owner = [part.searcher.chunk_doc for part in library.parts]
        first = len(library.store.documents)
        owner = np.concatenate([owner[0], np.where(owner[1] == FORGOTTEN, FORGOTTEN, owner[1] + first)])
        if len(self._pieces) > len(owner):  # the library was reset
            self.__init__(library, self.encode)
        new = np.arange(len(self._pieces), len(owner))
        if len(new):
            tokens, mask = library.values(new[:, None])
            decode = library.tokenizer.decode_bytes
            texts = [decode(t[m]).decode("utf-8", "replace") for t, m in zip(tokens[:, 0], mask[:, 0])]
            names = [library.documents[library.place(int(chunk)).document].name for chunk in new]
            texts = [f"{name.rpartition('.')[0] or name}. {text}" for name, text in zip(names, texts)]
            found = [frozenset(pieces(text)) for text in texts]
            self._pieces += found
            self._counts.update(piece for each in found for piece in each)
            if self.encode is not None:
                vectors = self.encode(texts)
                self._vectors = vectors if not self._vectors.size else np.concatenate([self._vectors, vectors])
        return owner

    def search(self, question: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids int64 [k] of the best passages, -1 for none, and their matches float32 [k].

        Passages do not overlap: of chunks that are in one another's passage the best is returned.
        """
        owner, asked = self._read(), frozenset(pieces(question))
        rarity = {piece: math.log1p((len(owner) + 0.5) / (self._counts[piece] + 0.5)) for piece in sorted(asked)}
        whole = sum(rarity.values()) or 1.0
        match = np.array([sum(rarity[piece] for piece in asked & held) / whole for held in self._pieces])
        if self.encode is not None and len(match):
            match = (match + self._vectors @ self.encode([question])[0]) / 2
        ids, apart = np.full(k, -1), self.library.passage_chunks
        chosen: list[int] = []
        for chunk in np.argsort(-match, kind="stable").tolist():
            if len(chosen) == k:
                break
            near = any(owner[chunk] == owner[other] and abs(chunk - other) < apart for other in chosen)
            if owner[chunk] != FORGOTTEN and match[chunk] > 0 and not near:
                chosen.append(chunk)
        ids[: len(chosen)] = chosen
        return ids, np.append(match, 0.0)[ids].astype(np.float32)


def chat_prompt(tokenizer, text: str) -> np.ndarray:
    """Return the token ids of a user's text in the chat template of a `HubTokenizer`."""
    said = [{"role": "user", "content": text}]
    found = tokenizer.theirs.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    return np.asarray(found, np.int64)


def _text_place(tokenizer, prompt: np.ndarray) -> int:
    """Return the position at which the user's text begins in a prompt: there it differs from a prompt without text."""
    bare = chat_prompt(tokenizer, "")
    same = min(len(prompt), len(bare))
    return next((i for i in range(same) if prompt[i] != bare[i]), same)


def reading_chat(tokenizer, text: str, chunk_len: int, filler: int) -> np.ndarray:
    """Return `chat_prompt` with filler tokens before the user's text, so that all of its tokens read neighbours.

    Reading begins with the last token of the first chunk. If the template is that long, nothing is inserted.
    """
    prompt = chat_prompt(tokenizer, text)
    at = _text_place(tokenizer, prompt)
    return np.insert(prompt, at, np.full(max(0, chunk_len - 1 - at), filler)).astype(np.int64)


FROM_NOTES = "Answer briefly from the notes above."


def with_passages(question: str, passages: Sequence[str]) -> str:
    """Return a question behind its passages, for in-context retrieval."""
    notes = "\n\n".join(passage.strip() for passage in passages)
    return f"{notes}\n\n{FROM_NOTES} {question}" if passages else question


def says(reply: str, answers: Sequence[str]) -> bool:
    """Whether one of the answers is in the reply, as whole words, whatever the case."""
    return any(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", reply, re.I) for answer in answers)


def declines(reply: str) -> bool:
    """Whether a reply says that the notes do not tell.

    declines("The notes do not mention the roof.") and not declines("The roof is not old.")
    """
    verb = r"(?:say|state|mention|know|tell|specif|contain|include|provide|give|clear|information)"
    return re.search(rf"(?:\b(?:not|cannot|no|unable)|n't)\b[^.!?]{{0,30}}\b{verb}", reply, re.I) is not None


@functools.cache
def sentence_encoder(folder: str) -> Encode:
    """Return the encoder of a local transformers folder, such as all-MiniLM-L6-v2: mean of the states, unit length."""
    from transformers import AutoModel, AutoTokenizer

    local = {"local_files_only": True, "trust_remote_code": False}
    tokenizer, model = AutoTokenizer.from_pretrained(folder, **local), AutoModel.from_pretrained(folder, **local).eval()

    @torch.no_grad()
    def encode(texts: Sequence[str]) -> np.ndarray:
        vectors = []
        for first in range(0, len(texts), 64):
            part = tokenizer(
                list(texts[first : first + 64]), padding=True, truncation=True, max_length=256, return_tensors="pt"
            )
            weight = part["attention_mask"].unsqueeze(-1)
            mean = (model(**part).last_hidden_state * weight).sum(1) / weight.sum(1)
            vectors.append(torch.nn.functional.normalize(mean, dim=-1).numpy())
        return np.concatenate(vectors)

    return encode
