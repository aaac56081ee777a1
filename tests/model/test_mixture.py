"""Sources in given proportions: the stream, exactly resumed, and the documents of a database. Parts of a neighbour."""

import itertools
import pickle

import numpy as np
import pytest

from retro_model.data.mixture import TABLE_8, mixed, proportioned
from retro_model.data.parts import OnlyPart
from tests.model import toys
from tests.model.data import store_of


def counted(start):
    return itertools.count(start)


def test_table_8():
    """Web 0.55, books 0.25, news 0.1, Wikipedia 0.05, GitHub 0.05 (Table 1)."""
    shares = {
        name: sum(w for key, w in TABLE_8.items() if key.startswith(name))
        for name in ("web", "books", "news", "wikipedia", "github")
    }
    assert shares == pytest.approx(
        {"web": 0.55, "books": 0.25, "news": 0.1, "wikipedia": 0.05, "github": 0.05}, abs=6e-4
    )
    assert len(TABLE_8) == 23


def test_sources_come_by_weight_and_a_resumed_stream_goes_on():
    streams = {name: lambda start, name=name: ((name, i) for i in counted(start)) for name in "abc"}
    weights = {"a": 5, "b": 3, "c": 2}
    whole = list(itertools.islice(mixed(streams, weights, seed=1), 4000))
    shares = {name: sum(item[0] == name for item in whole) / 4000 for name in "abc"}
    assert shares == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.2}, abs=0.03)
    for name in "abc":  # each source in its own order, nothing left out
        assert [i for n, i in whole if n == name] == list(range(sum(n == name for n, _ in whole)))
    for start in (0, 1, 1234):
        assert list(itertools.islice(mixed(streams, weights, seed=1, start=start), 50)) == whole[start : start + 50]
    assert list(itertools.islice(mixed(streams, weights, seed=2), 50)) != whole[:50]
    with pytest.raises(ValueError, match="weights: expected one for each of a, b, c; got a, b"):
        mixed(streams, {"a": 1, "b": 2}, seed=0)
    with pytest.raises(ValueError, match="weights: expected positive numbers"):
        mixed(streams, weights | {"c": 0}, seed=0)


def test_a_database_in_proportions(tmp_path):
    stores = {
        "web": store_of(tmp_path / "web", [[5] * 10] * 30),
        "books": store_of(tmp_path / "books", [[6] * 25] * 4 + [[6] * 5]),
    }
    documents = list(proportioned(stores, {"web": 3, "books": 1}))
    tokens = {
        name: sum(len(d.content) for d in documents if d.content[0] == i) for name, i in (("web", 5), ("books", 6))
    }
    assert tokens == {"web": 300, "books": 100}
    few = list(proportioned(stores, {"web": 1, "books": 1}, tokens=60))
    assert [len(d.content) for d in few] == [10, 10, 10, 25, 5]
    assert [(d.name, d.group) for d in few][:2] == [("0", "g"), ("1", "g")]
    with pytest.raises(ValueError, match="tokens: expected at most 400, for which 'web' has its share; got 401"):
        proportioned(stores, {"web": 3, "books": 1}, tokens=401)


def test_a_part_of_each_neighbour():
    database = toys.Database(toys.random_store(12, 4))
    ids = np.array([[0, 3], [-1, 5]])
    tokens, mask = database.values(ids)
    for part, here in (("N", slice(0, 4)), ("F", slice(4, 8))):
        only = OnlyPart(database, part)
        got = only.values(ids)
        assert np.array_equal(got[0], tokens[..., here]) and np.array_equal(got[1], mask[..., here])
        assert np.array_equal(only.document_of(ids), database.document_of(ids))
        assert np.array_equal(pickle.loads(pickle.dumps(only)).values(ids)[0], got[0])
    with pytest.raises(ValueError, match="part: expected 'N' or 'F'; got 'NF'"):
        OnlyPart(database, "NF")
