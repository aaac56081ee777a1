"""A library for a trained decoder: `retro-model retrofit` makes it, `retro-model compare` measures it beside everything
else that a user could do.

roff.py        text of a manual page
texts.py       documents of a folder, the machine's manual pages, the standard library; which are held out
library.py     store, leaks dropped, database, neighbours, in one folder that a killed run goes on in
fitting.py     training of what is added, saved now and then
contenders.py  everything that is compared, each with its cost and its control
record.py      differences with intervals, table, picture
compare.py, retrofit.py  the commands
"""
