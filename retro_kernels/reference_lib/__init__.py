"""Functions for the ops' definitions in plain PyTorch."""
