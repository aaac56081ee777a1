"""RETRO's demonstration on the sources of Python's standard library.

command.py runs it, plan.py has its sizes, corpus.py its data, options.py its options.
"""
