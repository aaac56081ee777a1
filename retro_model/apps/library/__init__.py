"""A library for a trained decoder: `retro-model retrofit` makes it, `compare` measures it beside the alternatives.

roff.py        text of a manual page
texts.py       documents of a folder, the machine's manual pages or the standard library; held-out documents
library.py     store without leaks, database and neighbours in one folder, where a killed run continues
fitting.py     training of what is added, saved now and then
contenders.py  the alternatives, each with its cost and its control
record.py      differences with intervals, table, picture
"""
