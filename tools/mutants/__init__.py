"""Mutation testing: plant faults of one line, one at a time, in a copy of the tree, and run the tests.

`operators` makes the faults from the current sources. `targets` names the tests of each file. explained.json says why
no test can notice a survivor: it is equivalent, or changes only speed or memory. Run `python -m tools.mutants`.
"""
