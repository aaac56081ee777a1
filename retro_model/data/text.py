"""Token-sequence routines in C++ (`csrc/text`) over NumPy arrays: common substrings, MinHash, Jaccard similarity, BM25.

Token ids are of any integer type, from 0 to 2**31 - 1. Calls run without the GIL, in as many threads as torch. Their
number does not change a result.
"""

from __future__ import annotations

import numpy as np
import torch

from retro_kernels import extensions
from retro_model.base import checks

from .arrays import integers, row_lengths, seen, within

ABI = 1  # version of the bindings' signatures, equal to `abi` in csrc/text/bindings.cpp
NO_TOKEN = -1  # stands for a masked token; equals no token of a chunk


def common_prefix_lengths(chunks, sources, *, lengths=None, source_mask=None) -> np.ndarray:
    """Return, for every token of a chunk, the length of the longest run from it that occurs in one of its sources.

    The paper's tables of samples colour the tokens of chunk C_u by this length against the retrieved RET(C_{u-1}).

        >>> common_prefix_lengths([[1, 2, 3, 9]], [[[2, 3, 1], [7, 1, 2]]])
        array([[2, 2, 1, 0]], dtype=int32)

    chunks: token ids [n,M].
    sources: token ids [n,K,R]; a match lies within one source.
    lengths: real tokens of each chunk [n], 0 .. M; None: M. The others get 0.
    source_mask: bool [n,K] or [n,K,R], True = may match; None: all may.
    Returns: int32 [n,M].
    Raises: TypeError, ValueError naming the argument.
    Source: Borgeaud et al., arXiv 2112.04426, section 4.5, tables 6 and 7.
    """
    chunks, sources = _tokens("chunks", chunks, 2), _tokens("sources", sources, 3)
    n, width = chunks.shape
    if sources.shape[0] != n:
        raise ValueError(f"sources: expected [n,K,R] with n={n} as in chunks; got {list(sources.shape)}")
    lengths = row_lengths("lengths", lengths, n, width)
    if source_mask is not None:
        source_mask = np.asarray(source_mask)
        if source_mask.dtype != np.bool_ or source_mask.shape not in (sources.shape[:2], sources.shape):
            want = f"bool [n,K]={list(sources.shape[:2])} or [n,K,R]={list(sources.shape)}"
            raise ValueError(f"source_mask: expected {want}; got {source_mask.dtype} {list(source_mask.shape)}")
        mask = source_mask if source_mask.ndim == 3 else source_mask[..., None]
        sources = np.where(mask, sources, np.int32(NO_TOKEN))
    out = np.empty((n, width), np.int32)
    native().prefixes(chunks, lengths, np.ascontiguousarray(sources), out, torch.get_num_threads())
    return out


def longest_common_substrings(chunks, sources, *, lengths=None, source_mask=None) -> np.ndarray:
    """Return s of the leakage measure r(C) = s/m: the longest run of tokens shared by a chunk and one of its sources.

        >>> longest_common_substrings([[1, 2, 3, 9]], [[[2, 3, 1], [1, 2, 3]]])
        array([3])

    Arguments and errors of `common_prefix_lengths`.

    Returns: int64 [n], from 0 to M.
    Source: Borgeaud et al., arXiv 2112.04426, section 2.6.
    """
    prefixes = common_prefix_lengths(chunks, sources, lengths=lengths, source_mask=source_mask)
    return prefixes.max(axis=1, initial=0).astype(np.int64)


def minhash_signatures(tokens, offsets, num_permutations: int = 128, *, ngram: int = 13, seed: int = 0) -> np.ndarray:
    """Return MinHash signatures. Two documents agree in a column with probability equal to their Jaccard similarity.

    A document shorter than `ngram` is a single n-gram. The columns of an empty document hold 2**32 - 1.

    tokens: token ids of all documents, one after the other.
    offsets: [documents + 1]; document d is tokens[offsets[d] : offsets[d + 1]].
    num_permutations: columns.
    ngram: tokens of an n-gram.
    seed: of the hash functions; signatures of different seeds are not comparable.
    Returns: uint32 [documents, num_permutations].
    Raises: TypeError, ValueError naming the argument.
    Source: Borgeaud et al., arXiv 2112.04426, section 2.1 (13-grams); Broder, 1997 (MinHash).
    """
    tokens, offsets = _documents(tokens, offsets)
    checks.integer("num_permutations", num_permutations, low=1)
    checks.integer("ngram", ngram, low=1)
    out = np.empty((len(offsets) - 1, num_permutations), np.uint32)
    native().signatures(tokens, offsets, ngram, seed & (2**64 - 1), out, torch.get_num_threads())
    return out


def ngram_jaccard(tokens, offsets, pairs, *, ngram: int = 13) -> np.ndarray:
    """Return the exact Jaccard similarity of the n-gram sets of pairs of documents.

        >>> ngram_jaccard([1, 2, 3, 1, 2, 4], [0, 3, 6], [[0, 1]], ngram=2)
        array([0.33333333])

    tokens, offsets, ngram: as `minhash_signatures`.
    pairs: document numbers [p,2].
    Returns: float64 [p]; 0 for two empty documents.
    Raises: TypeError, ValueError naming the argument.
    """
    tokens, offsets = _documents(tokens, offsets)
    checks.integer("ngram", ngram, low=1)
    pairs = np.ascontiguousarray(integers("pairs", pairs, 2), dtype=np.int64)
    if pairs.shape[1] != 2 or (pairs.size and (pairs.min() < 0 or pairs.max() >= len(offsets) - 1)):
        raise ValueError(f"pairs: expected [p,2] within 0 .. {len(offsets) - 2}; got {seen(pairs)}")
    out = np.empty(len(pairs), np.float64)
    native().jaccards(tokens, offsets, pairs, ngram, out, torch.get_num_threads())
    return out


def bm25_scores(chunks, queries, *, lengths=None, query_lengths=None, k1: float = 1.5, b: float = 0.75) -> np.ndarray:
    """Return BM25 scores of every chunk of a document for every query, with the document's own statistics.

        score(c, q) = sum over q's tokens, repetitions included, of
                      idf * tf (k1 + 1) / (tf + k1 (1 - b + b |c| / mean |c|))
        idf = log((N - n + 0.5) / (n + 0.5)), N chunks, n of them with the token; a negative idf becomes 0.25 * mean idf

        >>> bm25_scores([[1, 2], [3, 4], [5, 6]], [[1, 3], [1, 1]]).round(2)
        array([[0.51, 0.51, 0.  ],
               [1.02, 0.  , 0.  ]], dtype=float32)

    chunks: token ids [L,M].
    queries: token ids [Q,T].
    lengths, query_lengths: real tokens of each row, [L] and [Q]; None: all.
    k1, b: saturation of a token's count, weight of a chunk's length.
    Returns: float32 [Q,L].
    Raises: TypeError, ValueError naming the argument.
    Source: Robertson and Zaragoza, 2009; the idf as in Python's rank_bm25.
    """
    chunks, queries = _tokens("chunks", chunks, 2), _tokens("queries", queries, 2)
    lengths = row_lengths("lengths", lengths, *chunks.shape)
    sizes = row_lengths("query_lengths", query_lengths, *queries.shape)
    out = np.empty((len(queries), len(chunks)), np.float32)
    native().bm25(chunks, lengths, queries, sizes, float(k1), float(b), out, torch.get_num_threads())
    return out


def native():
    module, why = extensions.load("retro_model._text", ABI, "a C++ compiler")
    if module is None:
        raise ImportError(why)
    return module


def _tokens(name: str, values, dims: int) -> np.ndarray:
    return np.ascontiguousarray(within(name, values, 0, 2**31 - 1, "token ids", dims), dtype=np.int32)


def _documents(tokens, offsets) -> tuple[np.ndarray, np.ndarray]:
    tokens = _tokens("tokens", tokens, 1)
    offsets = np.ascontiguousarray(integers("offsets", offsets, 1), dtype=np.int64)
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(tokens) or (np.diff(offsets) < 0).any():
        ends = f"{offsets[0]} .. {offsets[-1]}" if len(offsets) else "none"
        raise ValueError(f"offsets: expected ascending from 0 to the {len(tokens)} tokens; got {ends}")
    return tokens, offsets
