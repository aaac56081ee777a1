"""Kernels compiled ahead of time: tile tables, targets, launches without a GPU, warm-up, shipped kernels."""
