"""`retro-model retrofit`: give a trained decoder a library.

texts.py     documents of a folder or of the standard library; held-out documents
prepared.py  store without leaks, database and neighbours in one folder; a killed run continues there
fitting.py   training of the added parameters, with checkpoints
prefix.py    choice of a shared prefix
copying.py   fit of copying from neighbours
"""
