"""The paper's evaluations as tasks of EleutherAI's harness, over the user's files of rows, one document each.

    lm_eval.simple_evaluate(RetroLM(...), tasks=[lambada("lambada_test.jsonl"), curation("curation.jsonl")])
    retro-model lm-eval --model_args folder=demo-out --tasks lambada=lambada_test.jsonl curation=curation.jsonl

Nothing here needs lm_eval: a task is the dict that its `tasks=` takes, or the YAML file that its `--include_path`
holds. Source: section 4.1, 4.3 and appendix C of arXiv 2112.04426.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from retro_model.data.text_files import read_rows

from .question_answering import PROMPT, exact_match

TL_DR = "\n\nTL;DR:"


def lambada(path: str | Path) -> dict[str, Any]:
    """Accuracy of the last word, by greedy sampling. Fields: text."""
    context = "{{text.rstrip().rpartition(' ')[0]}}"  # empty for a text of one word
    return _task("lambada", path, "text", "loglikelihood", {"acc": "mean"}, (context, last_word))


def curation(path: str | Path) -> dict[str, Any]:
    """Bits per byte of the summary after the article and "TL;DR:". Fields: article, summary."""
    metrics = {"bits_per_byte": "bits_per_byte"}
    return _task(
        "curation",
        path,
        "article summary",
        "loglikelihood",
        metrics,
        ("{{article}}" + TL_DR, summary),
        process_results=summary_bits,
    )


def wikitext103(path: str | Path) -> dict[str, Any]:
    """Perplexity a word and bits per byte of whole articles, in `RetroLM`'s window and stride. Fields: text."""
    metrics = {"word_perplexity": "weighted_perplexity", "bits_per_byte": "bits_per_byte"}
    return _task("wikitext103", path, "text", "loglikelihood_rolling", metrics, ("", "text"), process_results=text_bits)


def question_answering(path: str | Path, *, max_new_tokens: int = 16) -> dict[str, Any]:
    """Exact match of the generated answer. Fields: question, answers (a list), passages (a list of {title, text},
    nearest first; read by `passages_of`, the `passages` of `RetroLM`)."""
    how = {"until": ["\n"], "max_gen_toks": max_new_tokens, "do_sample": False}
    how = {"process_results": answer_matches, "generation_kwargs": how}
    return _task(
        "question_answering",
        path,
        "question answers",
        "generate_until",
        {"exact_match": "mean"},
        (PROMPT.format(question="{{question}}"), first_answer),
        **how,
    )


#: name on the command line -> what makes the task of a file
TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    made.__name__: made for made in (lambada, curation, wikitext103, question_answering)
}


def passages_of(doc: dict) -> list[tuple[str, str]]:
    """Return the passages of a document of `question_answering`."""
    return [(passage["title"], passage["text"]) for passage in doc.get("passages") or ()]


# Functions that a task's YAML file names


def last_word(doc: dict) -> str:
    """Return the last word, with the space before it."""
    _, space, word = doc["text"].rstrip().rpartition(" ")
    return space + word


def summary(doc: dict) -> str:
    """Return the summary, with a space before it."""
    return " " + doc["summary"]


def summary_bits(doc: dict, results: list) -> dict[str, tuple]:
    """Return nats and bytes of the summary."""
    return {"bits_per_byte": (results[0][0], len(summary(doc).encode()))}


def text_bits(doc: dict, results: tuple) -> dict[str, tuple]:
    """Return nats, words and bytes of a text."""
    (nats,), text = results, doc["text"]
    return {"word_perplexity": (nats, len(re.split(r"\s+", text))), "bits_per_byte": (nats, len(text.encode()))}


def first_answer(doc: dict) -> str:
    """Return the first accepted answer."""
    return doc["answers"][0]


def answer_matches(doc: dict, results: list) -> dict[str, float]:
    """Whether the generated answer is one of those accepted."""
    return {"exact_match": float(exact_match(results[0], doc["answers"]))}


def write_yaml(task: dict[str, Any], folder: Path) -> Path:
    """Write a task as the file that lm_eval's `--include_path` reads, functions by their names."""
    import yaml  # comes with lm_eval

    class Dumper(yaml.SafeDumper):
        pass

    Dumper.add_representer(
        type(write_yaml), lambda dumper, f: dumper.represent_scalar("!function", f"{f.__module__}.{f.__name__}")
    )
    path = folder / f"{task['task']}.yaml"
    path.write_text(yaml.dump(task, Dumper=Dumper, sort_keys=False), encoding="utf-8")
    return path


def rows_of(path: str, **_) -> dict[str, Any]:
    """Return the data set of a task: the rows of its file, as lm_eval takes them. A missing field is None."""
    import datasets  # comes with lm_eval

    rows = [row for _, row in read_rows(path)]
    fields = {name: None for row in rows for name in row}
    return {"test": datasets.Dataset.from_list([fields | row for row in rows])}


def _task(
    name: str, path: str | Path, needed: str, kind: str, metrics: dict[str, str], ends: tuple, **fields
) -> dict[str, Any]:
    """Describe a task; kind: its output_type. needed: fields that each row must have. metrics: name -> aggregation;
    higher means are better, lower perplexities and bits. ends: the context and the target of a document, each as a
    template, a field or a function.

    Raises: FileNotFoundError. ValueError naming the line that cannot be read or lacks a field.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"path: expected a file of JSON lines; got {path}")
    for place, row in read_rows(path):
        if lacking := [field for field in needed.split() if row.get(field) is None]:
            has = ", ".join(map(repr, row)) or "none"
            raise ValueError(f"{place}: expected the field {lacking[0]!r} of {name}; got {has}")
    source = {"custom_dataset": rows_of, "dataset_kwargs": {"path": str(path)}, "test_split": "test"}
    metrics = [{"metric": m, "aggregation": how, "higher_is_better": how == "mean"} for m, how in metrics.items()]
    fields |= {"output_type": kind, "metric_list": metrics, "doc_to_text": ends[0], "doc_to_target": ends[1]}
    return {"task": f"retro_{name}", **source, "target_delimiter": "", "metadata": {"version": 1}, **fields}
