"""The paper's evaluations as tasks of EleutherAI's harness, over files on the user's machine: JSON lines, one document
each.

    lm_eval.simple_evaluate(RetroLM(...), tasks=[lambada("lambada_test.jsonl"), curation("curation.jsonl")])

Nothing here needs lm_eval: a task is the dict that its `tasks=` takes. Source: section 4.1, 4.3 and appendix C of arXiv
2112.04426.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .question_answering import PROMPT, exact_match

TL_DR = "\n\nTL;DR:"


def lambada(path: str | Path) -> dict[str, Any]:
    """Accuracy of the last word, by greedy sampling. Fields: text."""
    metrics = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    return _task(
        "retro_lambada",
        path,
        output_type="loglikelihood",
        metric_list=metrics,
        doc_to_text=lambda doc: doc["text"].rsplit(" ", 1)[0],
        doc_to_target=lambda doc: " " + doc["text"].rsplit(" ", 1)[1],
    )


def curation(path: str | Path) -> dict[str, Any]:
    """Bits per byte of the summary after the article and "TL;DR:". Fields: article, summary."""
    metrics = [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}]
    return _task(
        "retro_curation",
        path,
        output_type="loglikelihood",
        metric_list=metrics,
        doc_to_text=lambda doc: doc["article"] + TL_DR,
        doc_to_target=lambda doc: " " + doc["summary"],
        process_results=lambda doc, results: {"bits_per_byte": (results[0][0], 1 + len(doc["summary"].encode()))},
    )


def wikitext103(path: str | Path) -> dict[str, Any]:
    """Perplexity a word and bits per byte of whole articles, in windows of `RetroLM`'s window and
    stride. Fields: text.
    """
    kinds = {"word_perplexity": "weighted_perplexity", "bits_per_byte": "bits_per_byte"}
    metrics = [{"metric": name, "aggregation": how, "higher_is_better": False} for name, how in kinds.items()]
    return _task(
        "retro_wikitext103",
        path,
        output_type="loglikelihood_rolling",
        metric_list=metrics,
        doc_to_text="",
        doc_to_target=lambda doc: doc["text"],
        process_results=_rolling,
    )


def question_answering(path: str | Path, *, max_new_tokens: int = 16) -> dict[str, Any]:
    """Exact match of the generated answer. Fields: question, answers (a list), passages (a list of {title, text},
    nearest first; read by `passages_of`, the `passages` of `RetroLM`)."""
    metrics = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    return _task(
        "retro_question_answering",
        path,
        output_type="generate_until",
        metric_list=metrics,
        doc_to_text=lambda doc: PROMPT.format(question=doc["question"]),
        doc_to_target=lambda doc: doc["answers"][0],
        generation_kwargs={"until": ["\n"], "max_gen_toks": max_new_tokens, "do_sample": False},
        process_results=lambda doc, results: {"exact_match": float(exact_match(results[0], doc["answers"]))},
    )


def passages_of(doc: dict) -> list[tuple[str, str]]:
    """The passages of a document of `question_answering`."""
    return [(passage["title"], passage["text"]) for passage in doc.get("passages") or ()]


def _rolling(doc: dict, results: tuple) -> dict[str, tuple]:
    (nats,), text = results, doc["text"]
    return {"word_perplexity": (nats, len(re.split(r"\s+", text))), "bits_per_byte": (nats, len(text.encode()))}


def _task(name: str, path: str | Path, **fields) -> dict[str, Any]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"path: expected a file of JSON lines; got {path}")
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test"}
    return {"task": name, **source, "target_delimiter": "", "metadata": {"version": 1}, **fields}
