"""`retro-model compare`: score a decoder with a library next to the alternatives.

contenders.py  the alternatives, each with its cost and its control
results.py     differences with intervals, table, picture
"""
