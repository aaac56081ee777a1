"""Documents to chunks, chunks to a database, a database to neighbours.

tokens.py      Tokenizer: byte-level BPE; the exact bytes of every token
hub.py         tokenizers of the Hugging Face libraries
documents.py   rows of data sets and plain strings as documents
text_files.py  documents of files: encodings, JSON lines, parquet, links and copies
store.py       TokenStore: documents as rows of M tokens, memory-mapped; build_store continues after a kill
shards.py      stores and databases of many shards, read as one
building.py    builds of many shards in a pool or on a cluster, and of an index over them
dedup.py       training documents that nearly repeat a held-out one, by MinHash
embed.py       frozen embedders: hashed TF-IDF, transformers encoders
search.py      exact search without the query's own document
faiss_index.py search by a FAISS index, and its recall against exact search
database.py    ChunkDatabase: keys N, values [N, F]
neighbours.py  the neighbours of every chunk of a store, computed once
text.py        common substrings and MinHash in C++
files.py       manifests, checksums, builds that continue
"""
