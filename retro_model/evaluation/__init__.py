"""Scores of models on held-out documents.

scoring.py    nats of every chunk in overlapping windows, bits-per-byte
decoders.py   Hugging Face decoders, called as ours
in_context.py neighbours in front of the text, for any decoder; random neighbours, the control
rpt.py        RPT token by token: perplexity, the ranking of its retriever, the share of time of retrieval
leaks.py      share of a text that the training text holds, bits-per-byte by that share
outcome.py    table and bootstrap that compare models; the gain by leakage, as numbers and a picture; sentences
suffixes.py   the likelihood of a suffix: last words, summaries
question_answering.py  passages as neighbours, exact match
knn_lm.py     the paper's baseline
tasks.py      the paper's evaluations as tasks of lm_eval (`retro_model.integrations.lm_eval`)
"""

from .in_context import exchanged_neighbours, random_neighbours, score_in_context
from .leaks import LEAKAGE_LENGTH, LEAKAGE_NEIGHBOURS, WindowLeaks, curve, leakage, window_leaks
from .outcome import bootstrap, gain_of_retrieval, gains, plot_gains, table, verdicts
from .scoring import Scores, bits_per_byte, score, windows
from .suffixes import Suffix, score_suffixes

__all__ = ["LEAKAGE_LENGTH", "LEAKAGE_NEIGHBOURS", "Scores", "Suffix", "WindowLeaks", "bits_per_byte", "bootstrap"]
__all__ += ["curve", "exchanged_neighbours", "gain_of_retrieval", "gains", "leakage", "plot_gains", "random_neighbours"]
__all__ += ["score", "score_in_context", "score_suffixes", "table", "verdicts", "window_leaks", "windows"]
