"""Commands of `retro-model`.

demo/      the whole way on the sources of Python's standard library
mosaics/   the demonstrations of the Memory Mosaics paper
rpt/       demonstrations of RPT
retrofit.py  retrieval for a frozen decoder
serve/     `serve` and `ask`: a trained model with its library
evaluate/  the evaluation harness, neighbours of a data set
"""
