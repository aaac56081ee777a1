"""Scores of models on held-out documents.

scoring.py    nats of every chunk in overlapping windows, bits-per-byte
decoders.py   Hugging Face decoders, called as ours
in_context.py neighbours in front of the text, for any decoder; random neighbours, the control
rpt.py        RPT token by token: perplexity, the ranking of its retriever, the share of time of retrieval
leaks.py      share of a text that the training text holds
outcome.py    bootstrap that compares models; the gain by leakage, as numbers and a picture; a sentence
suffixes.py   the likelihood of a suffix: last words, summaries
question_answering.py  passages as neighbours of a prompt
knn_lm.py     the paper's baseline
"""

from .in_context import exchanged_neighbours, random_neighbours, score_in_context
from .leaks import LEAKAGE_LENGTH, LEAKAGE_NEIGHBOURS, leakage
from .outcome import bootstrap, gain_of_retrieval, gains, plot_gains
from .scoring import Scores, bits_per_byte, score, windows
from .suffixes import Suffix, score_suffixes

__all__ = ["LEAKAGE_LENGTH", "LEAKAGE_NEIGHBOURS", "Scores", "Suffix", "bits_per_byte", "bootstrap"]
__all__ += ["exchanged_neighbours", "gain_of_retrieval", "gains", "leakage", "plot_gains", "random_neighbours"]
__all__ += ["score", "score_in_context", "score_suffixes", "windows"]
