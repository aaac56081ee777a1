"""Answers to questions about notes, by everything that can read passages: `compare --questions FILE.jsonl`.

A row has `question` and `answers`, the strings of which one has to be in the reply; none for a question that the notes
do not answer, whose reply has to say so. `notes` names the subfolder of --texts that the question is about, and `kind`
a group of the table.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from retro_model import generate
from retro_model.data.embed import HashedTfidf
from retro_model.data.hub import HubTokenizer
from retro_model.data.store import build_store
from retro_model.data.text_files import read_rows
from retro_model.evaluation.question_answering import same_for_every_chunk
from retro_model.folders import questions as asking
from retro_model.folders.documents import Documents
from retro_model.retrofit import OwnAttention, retrofit

from ..options import Sizes
from ..retrofit import texts
from ..retrofit.prepared import lengths, read_decoder, show_line


class Contender(NamedTuple):
    """One way to answer.

    reads: tokens of question and answer attend the passages. in_prompt: passages are in the prompt. random: passages
    are drawn at random, as a control. gated: with the bias and scale of `--gates`.
    """

    title: str
    reads: bool = False
    in_prompt: bool = False
    random: bool = False
    gated: bool = False


CONTENDERS = {
    "alone": Contender("decoder alone"),
    "own-whole": Contender("own attention, question and answer read", True),
    "own-whole-random": Contender("the same, random passages", True, random=True),
    "own-gates": Contender("own attention, question and answer read, trained gates", True, gated=True),
    "own-gates-random": Contender("the same, random passages", True, random=True, gated=True),
    "in-context": Contender("passages in the prompt", in_prompt=True),
    "in-context-random": Contender("the same, random passages", in_prompt=True, random=True),
    "both": Contender("passages in the prompt, and own attention", True, in_prompt=True),
}
#: Bias of every head of own attention without trained gates: a passage weighs as much as a text before the question.
BIAS = 0.0
NEW_TOKENS = 24
SHOWN = (1, 2, 4)  # numbers of passages for which recall is measured


def read_questions(path: Path) -> list[dict]:
    """Return the rows of a file, see `read_rows`. Raises: ValueError naming the line."""
    rows = []
    for place, row in read_rows(path):
        question, answers = row.get("question"), row.get("answers")
        if not isinstance(question, str) or not isinstance(answers, list) or not all(type(a) is str for a in answers):
            raise ValueError(f"--questions: expected question and answers, a list; got other fields in {place}")
        rows.append({"notes": "", "kind": "question"} | row)
    if not rows:
        raise ValueError(f"--questions: expected rows in {path}; got none")
    return rows


def open_notes(
    folder: Path, out: Path, tokenizer: HubTokenizer, sizes: Sizes, encode: asking.Encode | None
) -> asking.QuestionSearch:
    """Build the library of a folder of notes and return the search for passages in it. Nothing is held out."""
    _, documents = texts.load(folder, show=lambda line: None)
    store = build_store(out, documents, tokenizer, chunk_len=sizes.chunk_len)
    embedder = HashedTfidf(sizes.dim).fit(store)
    keys = embedder(store.chunks(range(len(store))), store.lengths)
    library = Documents(store, keys, embedder, tokenizer, passage_chunks=sizes.passage_chunks)
    return asking.QuestionSearch(library, encode)


def read_gates(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bias and scale [layers,heads] of own attention in a folder that `retro-model retrofit` wrote."""
    from retro_model.integrations.huggingface import RetrofitForCausalLM

    model = RetrofitForCausalLM.from_pretrained(folder / "model", local_files_only=True).model
    if not isinstance(model, OwnAttention):
        raise ValueError(f"--gates: expected a folder of own attention; got {type(model).__name__} in {folder}")
    return model.bias.detach().clone(), model.scale.detach().clone()


class Answerer:
    """Decoder that answers questions, greedily, in the ways of `CONTENDERS`. gates: folder of trained gates."""

    def __init__(self, decoder: Path, sizes: Sizes, gates: Path | None = None) -> None:
        self.tokenizer, self.sizes = HubTokenizer.load(decoder), sizes
        if not getattr(self.tokenizer.theirs, "chat_template", None):
            raise ValueError(f"decoder: expected one with a chat template, to ask it questions; got {decoder}")
        self.model = retrofit(read_decoder(decoder), neighbours="own", bias=BIAS, **lengths(sizes)).eval()
        self.filler = int(self.tokenizer.encode("\n")[0])
        self.gates = {False: (self.model.bias.detach().clone(), self.model.scale.detach().clone())}
        if gates is not None:
            self.gates[True] = read_gates(gates)
            got, wanted = tuple(self.gates[True][0].shape), tuple(self.model.bias.shape)
            if got != wanted:
                raise ValueError(
                    f"--gates: expected {wanted} layers and heads, as the decoder has; got {got} in {gates}"
                )

    @property
    def names(self) -> list[str]:
        """The contenders that can be asked."""
        return [name for name, contender in CONTENDERS.items() if contender.gated in self.gates]

    def reply(self, name: str, notes: asking.QuestionSearch, question: str, ids: np.ndarray, seed: int = 0) -> str:
        """Return the reply of a contender that is given the passages `ids` [K]. seed: of the random passages."""
        contender = CONTENDERS[name]
        if contender.random:
            ids = np.random.default_rng(seed).choice(len(notes.library.store), len(ids), replace=False)
        tokens, mask = notes.library.values(ids)
        mask = mask & (ids >= 0)[:, None]
        shown = [self.tokenizer.decode(t[m]) for t, m in zip(tokens, mask) if m.any()]
        text = asking.with_passages(question, shown) if contender.in_prompt else question
        prompt, retrieve = asking.chat_prompt(self.tokenizer, text), None
        if contender.reads:
            text = text if contender.in_prompt else f"{asking.FROM_NOTES} {text}"
            prompt = asking.reading_chat(self.tokenizer, text, self.sizes.chunk_len, self.filler)
            retrieve = same_for_every_chunk(torch.as_tensor(tokens), torch.as_tensor(mask))
        with torch.no_grad():
            for gate, value in zip((self.model.bias, self.model.scale), self.gates[contender.gated]):
                gate.copy_(value)
        stop = self.tokenizer.theirs.eos_token_id
        out = generate(self.model, [prompt], NEW_TOKENS, stop_token=stop, retrieve=retrieve)[0][len(prompt) :]
        return self.tokenizer.decode([int(token) for token in out if int(token) != stop])


def ask_all(answerer: Answerer, sets: dict[str, asking.QuestionSearch], rows: Sequence[dict]) -> list[dict]:
    """Return every row with whether each passage found holds an answer, and each contender's reply."""
    done = []
    for number, row in enumerate(rows, 1):
        notes = sets[row["notes"]]
        ids, _ = notes.search(row["question"], max(SHOWN))
        tokens, mask = notes.library.values(ids)
        passages = [answerer.tokenizer.decode(t[m]) for t, m in zip(tokens, mask & (ids >= 0)[:, None])]
        found = [asking.says(passage, row["answers"]) for passage in passages]
        replies = {}
        for name in answerer.names:
            began = time.perf_counter()
            reply = answerer.reply(name, notes, row["question"], ids[: answerer.sizes.neighbours], number)
            seconds = round(time.perf_counter() - began, 2)
            right = asking.says(reply, row["answers"]) if row["answers"] else asking.declines(reply)
            replies[name] = {"reply": reply, "right": right, "seconds": seconds}
        done.append(row | {"found": found, "replies": replies})
        if number % 10 == 0 or number == len(rows):
            show_line(f"  {number} of {len(rows)} questions")
    return done


def summary(done: Sequence[dict]) -> dict:
    """Return recall of the right passage, and for each contender the shares of right replies by kind.

    A reply to a question without an answer is right if it says that the notes do not tell. "right" counts the others.
    """
    answered = [row for row in done if row["answers"]]
    kinds = list(dict.fromkeys(row["kind"] for row in [*answered, *done]))
    share = lambda values: round(float(np.mean(values)), 3)  # noqa: E731
    contenders = {}
    for name in done[0]["replies"]:
        right = {kind: share([r["replies"][name]["right"] for r in done if r["kind"] == kind]) for kind in kinds}
        seconds = float(np.median([row["replies"][name]["seconds"] for row in done]))
        all_of_them = share([row["replies"][name]["right"] for row in answered])
        made = {"title": CONTENDERS[name].title, "right": all_of_them, "by_kind": right}
        contenders[name] = made | {"seconds": round(seconds, 2)}
    recall = {str(k): share([any(row["found"][:k]) for row in answered]) for k in SHOWN}
    return {"questions": len(done), "answerable": len(answered), "recall": recall, "contenders": contenders}


def markdown(found: dict) -> str:
    """Return a summary as a paragraph and a table."""
    kinds = list(next(iter(found["contenders"].values()))["by_kind"])
    recall = ", ".join(f"{share:.0%} with {k}" for k, share in found["recall"].items())
    lines = [
        f"{found['answerable']} of {found['questions']} questions have an answer. A passage that holds it is among "
        f"those found: {recall}.",
        "",
        "| | answerable | " + " | ".join(kinds) + " | seconds |",
        "|---|---|" + "---|" * (len(kinds) + 1),
    ]
    for row in found["contenders"].values():
        cells = [row["title"], f"{row['right']:.0%}", *(f"{row['by_kind'][kind]:.0%}" for kind in kinds)]
        lines.append("| " + " | ".join([*cells, f"{row['seconds']:.1f}"]) + " |")
    return "\n".join(lines) + "\n"


def run(
    decoder: Path,
    rows: list[dict],
    folder: Path,
    out: Path,
    sizes: Sizes,
    encoder: Path | None = None,
    facts: dict | None = None,
    gates: Path | None = None,
) -> dict:
    """Ask every question of every contender; write questions.json and questions.md and return the summary.

    encoder: folder of a sentence encoder for the search; None: words alone. facts: added to the record. gates: folder
    of trained gates, for the contenders that have them.
    """
    answerer = Answerer(decoder, sizes, gates)
    encode = None if encoder is None else asking.sentence_encoder(str(encoder))
    sets = {}
    for name in dict.fromkeys(row["notes"] for row in rows):
        sets[name] = open_notes(folder / name, out / "notes" / (name or "all"), answerer.tokenizer, sizes, encode)
        show_line(f"{name or folder.name}: {len(sets[name].library.documents)} documents")
    done = ask_all(answerer, sets, rows)
    found = summary(done)
    said = (facts or {}) | found | {"rows": done}
    (out / "questions.json").write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n")
    (out / "questions.md").write_text(markdown(found))
    return found
