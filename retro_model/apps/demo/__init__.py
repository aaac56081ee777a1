"""RETRO's demonstration on the sources of Python's standard library.

command.py runs it, options.py has its sizes and options, corpus.py its data.
"""
