"""Model folders: a trained model with its tokenizer, held-out texts and library, and readings of texts with them.

folder.py     `model.json`, which names the parts of a folder; describe, read
reader.py     Reader, open_folder: read texts with a folder's model, write
reading.py    TextReading: the cost of each token with and without retrieval, and the neighbours that hold it
documents.py  Documents: a library that changes while it is used
retrofit.py   reader of a retrofitted decoder
"""
