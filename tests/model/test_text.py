"""Common substrings and MinHash against brute force."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retro_kernels import extensions
from retro_model import _text
from retro_model.data import text
from tests.refusals import refused

# few distinct tokens: repeats, periodic sequences, many equal matches
SEQUENCE = st.integers(1, 4).flatmap(lambda alphabet: st.lists(st.integers(0, alphabet), max_size=24))


def occurs(part, whole) -> int:
    return next((j for j in range(len(whole) - len(part) + 1) if whole[j : j + len(part)] == part), -1)


def brute_substring(a, b):
    for length in range(min(len(a), len(b)), 0, -1):
        for i in range(len(a) - length + 1):
            if (j := occurs(a[i : i + length], b)) >= 0:
                return length, i, j
    return 0, 0, 0


def brute_prefixes(a, b):
    return [max(n for n in range(len(a) - i + 1) if occurs(a[i : i + n], b) >= 0) for i in range(len(a))]


@given(a=SEQUENCE, sources=st.lists(SEQUENCE, max_size=3), data=st.data())
def test_prefixes_and_substrings_of_batches(a, sources, data):
    """Ragged sources by mask, ragged chunks by length; masked tokens match nothing, a match stays within one source."""
    width = max([len(s) for s in sources], default=0)
    padded = np.zeros((1, len(sources), width), np.int64)
    mask = np.zeros(padded.shape, bool)
    for k, source in enumerate(sources):
        padded[0, k, : len(source)], mask[0, k, : len(source)] = source, True
    length = data.draw(st.integers(0, len(a)))
    real = a[:length]
    each = [brute_prefixes(real, source) for source in sources]
    want = [max([lengths[i] for lengths in each], default=0) for i in range(length)] + [0] * (len(a) - length)
    got = text.common_prefix_lengths([a], padded, lengths=[length], source_mask=mask)
    longest = text.longest_common_substrings(np.array([a], np.uint16), padded, lengths=[length], source_mask=mask)
    assert got.tolist() == [want]
    assert longest.tolist() == [max([brute_substring(real, s)[0] for s in sources], default=0)]


def test_a_whole_neighbour_is_masked():
    chunk, sources = [[1, 2, 3]], [[[1, 2, 3], [2, 3, 4]]]
    assert text.longest_common_substrings(chunk, sources).tolist() == [3]
    assert text.longest_common_substrings(chunk, sources, source_mask=np.array([[False, True]])).tolist() == [2]
    assert text.longest_common_substrings(chunk, sources, source_mask=np.zeros((1, 2), bool)).tolist() == [0]


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def prefixes_of_documents(a, b):
    """By the recurrence of matches that end at each pair of positions."""
    want, match = [], np.zeros(len(b) + 1, np.int64)
    for token in a[::-1]:
        match[:-1] = np.where(b == token, match[1:] + 1, 0)
        want.append(match.max())
    return want[::-1]


def test_prefixes_of_documents():
    """Positions beyond one word of bits; threads do not change a result."""
    rng = np.random.default_rng(0)
    a, b = rng.zipf(1.4, 4000) % 1000, rng.zipf(1.4, 3000) % 1000
    b[700:760] = a[100:160]
    periodic = np.tile([1, 1, 2], 1000)
    for x, y in [(a, b), (periodic, periodic[1:]), (np.zeros(900, int), np.zeros(2000, int))]:
        assert text.common_prefix_lengths(x[None], y[None, None])[0].tolist() == prefixes_of_documents(x, y)
    chunks, sources = rng.integers(0, 9, (100, 64)), rng.integers(0, 9, (100, 2, 128))
    with threads(1):
        one = text.common_prefix_lengths(chunks, sources)
    with threads(4):
        assert np.array_equal(text.common_prefix_lengths(chunks, sources), one)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_every_integer_type_and_stride(dtype):
    a = np.array([0, 100, 3, 100, 4, 100, 9, 100], dtype)[::2]
    assert text.common_prefix_lengths(a[None], np.array([[[4, 3, 4, 9]]], dtype)).tolist() == [[0, 3, 2, 1]]


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: text.common_prefix_lengths([[1.5]], [[[1]]]), TypeError, "chunks: expected integers; got float64"),
        (lambda: text.minhash_signatures([[1]], [0, 1]), ValueError, r"tokens: expected 1 dimension; got .*\[1, 1\]"),
        (lambda: text.common_prefix_lengths([1], [[[1]]]), ValueError, "chunks: expected 2 dimensions; got"),
        (lambda: text.common_prefix_lengths([[1]], [[[-1]]]), ValueError, r"sources: expected token ids .* -1 .. -1"),
        (lambda: text.common_prefix_lengths([[2**31]], [[[1]]]), ValueError, "chunks: expected token ids"),
        (lambda: text.common_prefix_lengths([["x"]], [[[1]]]), TypeError, "chunks: expected integers"),
        (lambda: text.common_prefix_lengths([[1]], [[[1]], [[1]]]), ValueError, r"sources: expected .* with n=1"),
        (lambda: text.common_prefix_lengths([[1]], [[[1]]], lengths=[2]), ValueError, "lengths: expected"),
        (lambda: text.common_prefix_lengths([[1]], [[[1]]], source_mask=[[1]]), ValueError, "source_mask: expected"),
        (lambda: text.minhash_signatures([1, 2], [0, 3]), ValueError, "offsets: .* the 2 tokens; got 0 .. 3"),
        (lambda: text.minhash_signatures([1, 2], [0, 2], 0), ValueError, "num_permutations: expected"),
        (lambda: text.ngram_jaccard([1, 2], [0, 2], [[0, 1]]), ValueError, r"pairs: expected \[p,2\] within 0 .. 0"),
    ],
)
def test_errors_name_the_argument(call, error, message):
    refused(message, call, error=error)


def test_without_the_extension_the_error_says_how_to_build_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "retro_model._text", None)
    monkeypatch.delattr("retro_model._text")
    monkeypatch.setattr(extensions, "load", extensions.load.__wrapped__)  # earlier results are kept
    refused(r"setup\.py build_ext --inplace", text.longest_common_substrings, [[1]], [[[1]]], error=ImportError)


def ngrams(document, n) -> set:
    return {tuple(document[i : i + n]) for i in range(max(1, len(document) - n + 1))} if document else set()


def joined(documents):
    return np.array([token for d in documents for token in d], np.int64), np.cumsum([0] + [len(d) for d in documents])


@given(documents=st.lists(SEQUENCE, min_size=2, max_size=2), n=st.integers(1, 5))
def test_jaccard_is_exact(documents, n):
    a, b = (ngrams(d, n) for d in documents)
    want = len(a & b) / len(a | b) if a | b else 0.0
    assert text.ngram_jaccard(*joined(documents), [[0, 1]], ngram=n).tolist() == [want]


def test_signatures_estimate_the_jaccard_similarity():
    """The share of equal columns is binomial around the similarity: within 4 standard deviations."""
    rng = np.random.default_rng(1)
    base = rng.integers(0, 5000, 400).tolist()
    documents = [base] + [base[:cut] + rng.integers(0, 5000, 400 - cut).tolist() for cut in (40, 120, 250, 360)]
    tokens, offsets = joined(documents)
    columns = 2048
    signatures = text.minhash_signatures(tokens, offsets, columns, seed=3)
    for other in range(1, len(documents)):
        a, b = ngrams(base, 13), ngrams(documents[other], 13)
        want = len(a & b) / len(a | b)
        got = (signatures[0] == signatures[other]).mean()
        assert abs(got - want) < 4 * np.sqrt(want * (1 - want) / columns)


def test_signatures_depend_on_content_and_seed_only():
    documents = [[1, 2, 3] * 10, [7, 8], [1, 2, 3] * 10, [7, 8], [8, 7], []]
    tokens, offsets = joined(documents)
    with threads(1):
        one = text.minhash_signatures(tokens, offsets, 16, ngram=4, seed=1)
    with threads(3):
        assert np.array_equal(one, text.minhash_signatures(tokens, offsets, 16, ngram=4, seed=1))
    assert np.array_equal(one[0], one[2]) and np.array_equal(one[1], one[3])
    assert not (one[1] == one[4]).any() and (one[5] == 2**32 - 1).all()
    assert not np.array_equal(one[0], text.minhash_signatures(tokens, offsets, 16, ngram=4, seed=2)[0])


@pytest.mark.parametrize(
    "share, reason", [(1.0, "was built from other sources: its abi is 1, the package's 7"), (0.5, "is damaged: ")]
)
def test_an_extension_that_does_not_fit_is_a_reason(tmp_path, share, reason):
    """An extension of older sources lacks functions or takes other arguments; a truncated one would end the process."""
    package, library = Path(text.__file__).parents[1], Path(_text.__file__)
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / package.name / library.name).write_bytes(library.read_bytes()[: int(library.stat().st_size * share)])
    code = """
import sys, retro_model
from retro_model.data import text
text.ABI = int(sys.argv[1])
text.longest_common_substrings([[1]], [[[1]]])
"""
    environ = os.environ | {"PYTHONPATH": str(package.parent)}
    done = subprocess.run([sys.executable, "-c", code, "7"], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: the extension retro_model._text {reason}"), (
        done.stderr
    )
