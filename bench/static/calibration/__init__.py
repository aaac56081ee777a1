"""The time estimate against published times of real GPUs.

kernels.py    kernels of public repositories, written anew with their algorithm, tile, warps and stages
published.py  rows: kernel, sizes, GPU, measured time, source
judge.py      errors of the estimate over the rows, the held-back third apart; `retro-bench estimate --calibration`
"""
