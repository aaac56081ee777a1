"""What a model makes of held-out documents.

scoring.py    nats of every chunk in overlapping windows, bits-per-byte
rpt.py        RPT: documents token by token, the retriever against the reference language model, where it helps
leaks.py      what of it the training text holds, bits-per-byte by that share
results.py    table, plot and bootstrap that compare models
colouring.py  samples coloured by longest common prefix
"""

from .leaks import LEAKAGE_LENGTH, LEAKAGE_NEIGHBOURS, curve, leakage
from .results import bootstrap, plot, table
from .scoring import Scores, bits_per_byte, score, windows

__all__ = [
    "LEAKAGE_LENGTH",
    "LEAKAGE_NEIGHBOURS",
    "Scores",
    "bits_per_byte",
    "bootstrap",
    "curve",
    "leakage",
    "plot",
    "score",
    "table",
    "windows",
]
