"""Faults of one line, planted one at a time in a copy of the tree: which of them do the tests not notice? `python -m
tools.mutants`.

`operators` makes the faults from the sources as they are, so none rots; `targets` says which file is held by which
tests; survivors that no test can notice (an equal program, a matter of speed) are explained in explained.json.
"""
