"""kNN-LM, the paper's baseline, beside RETRO: over the activations of the demonstration's baseline.

    retro-model demo --out demo-out
    retro-model knn-lm demo-out       # knn-lm.json in demo-out

The datastore holds the contexts of the training text, all models score the same tokens in the same windows. kNN-LM once
has the paper's lambda and alpha, and once those of a grid that are best on the other documents. Source: section 4.1 and
appendix C.2 of arXiv 2112.04426.
"""

from __future__ import annotations

import dataclasses
import json
import time

from retro_model import evaluation
from retro_model.apps.demo.command import RANDOM, score_all
from retro_model.evaluation import knn_lm

from .options import knn_lm as parser
from .trained import Trained, open_demo

PAPERS, TUNED = "kNN-LM, the paper's lambda and alpha", "kNN-LM, tuned on the other documents"
SHUFFLED = "kNN-LM, tuned, shuffled datastore"  # the control


def compare(
    demo: Trained, *, k: int = knn_lm.NEIGHBOURS, trained_documents: int | None = None, report=print
) -> dict[str, dict]:
    """Scores of the held-out text by the baseline, kNN-LM over it, and RETRO, each with its random control.

    trained_documents: of the training text, the first so many are the datastore; None: all.
    Returns: {name: {"bits_per_byte": bpb, "minus baseline": (difference, 2.5%, 97.5% over documents)}}; kNN-LM also
    has its settings, (lambda, alpha) or a list of them, one a document; tuned kNN-LM and RETRO have "gain", a sentence.
    """
    corpus, plan, held_out = demo.corpus, demo.plan, demo.corpus.validation
    options = {"window": plan.window, "stride": plan.stride}
    some = None if trained_documents is None else range(min(trained_documents, len(corpus.train.documents)))
    datastore = knn_lm.TokenDatastore.build(demo.baseline, corpus.train, documents=some, **options)
    report(f"{len(datastore.keys):,} contexts, {k} neighbours of each token")
    tuned = knn_lm.score_tuned(demo.baseline, datastore, held_out, k=k, **options)
    plan = dataclasses.replace(plan, evaluation_neighbours=(plan.neighbours,))
    scores = score_all(demo.retro, demo.baseline, corpus, plan) | {PAPERS: tuned.papers}
    controls = {f"RETRO on, {plan.neighbours} neighbours": RANDOM}
    if tuned.settings:  # one document alone: there are no others to tune on
        scores[TUNED] = tuned.scores
        control = knn_lm.score_tuned(demo.baseline, datastore.shuffled(), held_out, k=k, **options)
        scores[SHUFFLED], controls[TUNED] = control.scores, SHUFFLED
    found: dict[str, dict] = {}
    for name, one in scores.items():
        gap = evaluation.bootstrap(one, scores["baseline"], held_out)
        found[name] = {"bits_per_byte": evaluation.bits_per_byte(one), "minus baseline": gap}
        report(
            f"{name}: {found[name]['bits_per_byte']:.4f} bits per byte, minus the baseline {gap[0]:+.4f} (95% over "
            f"documents: {gap[1]:+.4f} to {gap[2]:+.4f})"
        )
    for name, control in controls.items():
        found[name]["gain"] = evaluation.gain_of_retrieval(scores[name], scores[control], held_out)
        report(f"{name}: {found[name]['gain']}")
    found[PAPERS]["settings"] = (knn_lm.LAMBDA, knn_lm.ALPHA)
    if tuned.settings:
        found[TUNED]["settings"] = tuned.settings
    return found


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    given = parser().parse_args(arguments)
    begin = time.perf_counter()
    found = compare(open_demo(given.folder), k=given.k, trained_documents=given.documents)
    path = given.folder / "knn-lm.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{time.perf_counter() - begin:.0f} s; {path}")
