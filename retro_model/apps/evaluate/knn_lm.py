"""kNN-LM, the paper's baseline, beside RETRO: over the activations of the demonstration's baseline.

    retro-model demo --out demo-out
    retro-model knn-lm demo-out       # knn-lm.json in demo-out

The datastore holds the contexts of the training text, all models score the same tokens in the same windows. kNN-LM once
has the paper's lambda and alpha, and once those of a grid that are best on the other documents. Source: section 4.1 and
appendix C.2 of arXiv 2112.04426.
"""

from __future__ import annotations

import json
import time

from retro_model import evaluation
from retro_model.evaluation import knn_lm

from .options import knn_lm as parser
from .trained import Trained, open_demo

PAPERS, TUNED = "kNN-LM, the paper's lambda and alpha", "kNN-LM, tuned on the other documents"


def compare(
    demo: Trained, *, k: int = knn_lm.NEIGHBOURS, trained_documents: int | None = None, report=print
) -> dict[str, dict]:
    """Scores of the held-out text by the baseline, kNN-LM over it, and RETRO.

    trained_documents: of the training text, the first so many are the datastore; None: all.
    Returns: {name: {"bits_per_byte": bpb, "minus baseline": (difference, 2.5%, 97.5% over documents)}}; kNN-LM also
    has its settings, (lambda, alpha) or a list of them, one a document.
    """
    corpus, plan, held_out = demo.corpus, demo.plan, demo.corpus.validation
    options = {"window": plan.window, "stride": plan.stride}
    some = None if trained_documents is None else range(min(trained_documents, len(corpus.train.documents)))
    datastore = knn_lm.TokenDatastore.build(demo.baseline, corpus.train, documents=some, **options)
    report(f"{len(datastore.keys):,} contexts, {k} neighbours of each token")
    tuned = knn_lm.score_tuned(demo.baseline, datastore, held_out, k=k, **options)
    near = corpus.validation_neighbours[:, : plan.neighbours]
    scores: dict[str, evaluation.Scores] = {
        "baseline": evaluation.score(demo.baseline, held_out, **options),
        PAPERS: tuned.papers,
        TUNED: tuned.scores,
        "RETRO off": evaluation.score(demo.retro, held_out, **options),
        f"RETRO on, {plan.neighbours} neighbours": evaluation.score(
            demo.retro, held_out, near, corpus.database, **options
        ),
    }
    if not tuned.settings:  # one document: there are no others to tune on
        del scores[TUNED]
    found: dict[str, dict] = {}
    for name, one in scores.items():
        gap = evaluation.bootstrap(one, scores["baseline"], held_out)
        found[name] = {"bits_per_byte": evaluation.bits_per_byte(one), "minus baseline": gap}
        report(
            f"{name}: {found[name]['bits_per_byte']:.4f} bits per byte, minus the baseline {gap[0]:+.4f} (95% over "
            f"documents: {gap[1]:+.4f} to {gap[2]:+.4f})"
        )
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
