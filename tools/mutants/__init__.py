"""Mutation testing: faults of one line are planted one at a time in a copy of the tree. Which do the tests miss?

`operators` makes the faults from the current sources, so none goes stale. `targets` says which tests hold which file.
explained.json explains survivors that no test can notice: an equal program, or a matter of speed. Run `python -m
tools.mutants`.
"""
