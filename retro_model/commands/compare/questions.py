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
from retro_model.data.database import ChunkDatabase
from retro_model.data.embed import HashedTfidf
from retro_model.data.hub import HubTokenizer
from retro_model.data.store import build_store
from retro_model.data.text_files import read_rows
from retro_model.evaluation.question_answering import same_for_every_chunk
from retro_model.folders import questions as asking
from retro_model.folders.documents import Documents
from retro_model.retrofit import OwnAttention, retrofit

from ..retrofit import texts
from ..retrofit.prepared import read_decoder


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
    folder: Path, out: Path, tokenizer: HubTokenizer, sizes, encode: asking.Encode | None
) -> asking.QuestionSearch:
    """Build the library of a folder of notes and return the search for passages in it. Nothing is held out."""
    _, documents = texts.load(folder, show=lambda line: None)
    store = build_store(out / "store", documents, tokenizer, chunk_len=sizes.chunk_len)
    embedder = HashedTfidf(sizes.dim).fit(store)
    keys = ChunkDatabase.build(out / "keys", store, embedder).searcher.keys
    least = {"least_similarity": sizes.least_similarity, "passage_chunks": sizes.passage_chunks}
    library = Documents(store, keys, embedder, tokenizer, **least)
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

    def __init__(self, decoder: Path, sizes, gates: Path | None = None) -> None:
        self.tokenizer, self.sizes = HubTokenizer.load(decoder), sizes
        if not getattr(self.tokenizer.theirs, "chat_template", None):
            raise ValueError(f"decoder: expected one with a chat template, to ask it questions; got {decoder}")
        lengths = {"chunk_len": sizes.chunk_len, "neighbour_len": sizes.passage_chunks * sizes.chunk_len}
        self.model = retrofit(read_decoder(decoder), neighbours="own", bias=BIAS, **lengths).eval()
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


def ask_all(answerer: Answerer, sets: dict[str, asking.QuestionSearch], rows: Sequence[dict], kept: Path, show):
    """Return every row with its passages, and the reply, correctness and seconds of each contender.

    kept: file of the rows that are done; a stopped run continues after them.
    """
    done = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()] if kept.exists() else []
    same = all(row == {name: old[name] for name in row} for row, old in zip(rows, done)) and len(done) <= len(rows)
    if not same or any(list(old["replies"]) != answerer.names for old in done):
        raise ValueError(f"--out: expected a folder without replies to other questions, or without --gates; got {kept}")
    for number, row in enumerate(rows[len(done) :], len(done) + 1):
        notes = sets[row["notes"]]
        began = time.perf_counter()
        ids, match = notes.search(row["question"], max(SHOWN))
        searched = time.perf_counter() - began
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
        facts = {"found": found, "match": [round(float(m), 3) for m in match], "search_seconds": round(searched, 3)}
        done.append(row | facts | {"replies": replies})
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(done[-1], ensure_ascii=False) + "\n")
        if number % 10 == 0 or number == len(rows):
            show(f"  {number} of {len(rows)} questions")
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
    best = {
        name: [max(row["match"]) for row in done if bool(row["answers"]) is (name == "answerable")]
        for name in ("answerable", "unanswerable")
    }
    matches = {name: [round(float(q), 3) for q in np.quantile(v, (0.1, 0.5, 0.9))] for name, v in best.items() if v}
    return {"questions": len(done), "answerable": len(answered), "recall": recall, "match": matches} | {
        "contenders": contenders
    }


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
    sizes,
    encoder: str | None,
    facts: dict,
    show,
    gates: Path | None = None,
) -> dict:
    """Ask every question of every contender; write questions.json and questions.md and return the summary.

    encoder: folder of a sentence encoder for the search; None: words alone. facts: added to the record. gates: folder
    of trained gates, for the contenders that have them.
    """
    answerer = Answerer(decoder, sizes, gates)
    encode = None if encoder is None else asking.sentence_encoder(encoder)
    sets = {}
    for name in dict.fromkeys(row["notes"] for row in rows):
        sets[name] = open_notes(folder / name, out / "notes" / (name or "all"), answerer.tokenizer, sizes, encode)
        show(f"{name or folder.name}: {len(sets[name].library.documents)} documents")
    done = ask_all(answerer, sets, rows, out / "replies.jsonl", show)
    found = summary(done)
    (out / "questions.json").write_text(json.dumps(facts | found | {"rows": done}, indent=1, ensure_ascii=False) + "\n")
    (out / "questions.md").write_text(markdown(found))
    return found
