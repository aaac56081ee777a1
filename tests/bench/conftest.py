"""A case of a tiny operator, and tables that a test may change."""

import pytest

import retro_bench
from retro_bench import registry
from retro_bench.measure import ceilings
from retro_bench.records import environment


@pytest.fixture(autouse=True)
def _measured(monkeypatch):
    """Forget the loaded plug-ins after a test: a record takes its commit from them."""
    monkeypatch.setattr(environment, "measured", None)


@pytest.fixture
def tables():
    """The registry; its tables are restored in place, because every module holds them by name."""
    kept = {name: dict(getattr(registry, name)) for name in ("OPERATORS", "CASES", "CONTENDERS")}
    yield registry
    for name, before in kept.items():
        table = getattr(registry, name)
        table.clear()
        table.update(before)


@pytest.fixture
def tiny(tables, monkeypatch):
    """`relative_attention` with a single case of a few thousand multiplications, on a machine of unknown ceilings."""
    monkeypatch.setattr(ceilings, "measure", lambda device: None)
    for key in [key for key in tables.CASES if key[0] == "relative_attention"]:
        del tables.CASES[key]
    case = retro_bench.Case(
        "relative_attention",
        "tiny",
        {"B": 1, "N": 12, "S": 12, "H": 2, "D": 16, "T": 12},
        "a test",
        {"causal": True, "rel_start": 0},
        ("rel_key", "content_bias", "position_bias"),
        dtypes={"cpu": ("float32",), "cuda": ("float32",)},
    )
    retro_bench.register(case)
    return case
