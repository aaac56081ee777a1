"""`retro-model compare`: score a decoder with a library next to the alternatives.

contenders.py  the alternatives, each with its control
results.py     scores on disk, differences with intervals, table
questions.py   answers to questions about notes
"""
