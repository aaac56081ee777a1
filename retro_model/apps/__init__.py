"""Commands of `retro-model`.

demo/      `demo`: RETRO end to end on the sources of Python's standard library
mosaics/   `mosaics`: the demonstrations of the Memory Mosaics paper
rpt/       `rpt`: the demonstration of RPT
library/   `retrofit` and `compare`: a library for a frozen decoder
serve/     `serve` and `ask`: a trained model with its library
evaluate/  `lm-eval`: the evaluation harness; `neighbours` of a data set
report.py  output of a demonstration
"""
