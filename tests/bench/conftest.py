"""A tiny operator's worth of cases, and tables that a test may change and get back."""

import pytest

import bench
from bench import registry


@pytest.fixture
def tables(monkeypatch):
    """The registry as copies: whatever a test registers is gone afterwards."""
    for name in ("OPERATORS", "CASES", "CONTENDERS"):
        copy = dict(getattr(registry, name))
        for module in (registry, bench):
            monkeypatch.setattr(module, name, copy)
    from bench import plan
    from bench.commands import list_command
    from bench.measure import runner

    for module in (plan, runner, list_command):
        for name in ("OPERATORS", "CASES", "CONTENDERS"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(registry, name))
    return registry


@pytest.fixture
def tiny(tables):
    """The only case of `relative_attention`: a few thousand multiplications."""
    for key in [key for key in tables.CASES if key[0] == "relative_attention"]:
        del tables.CASES[key]
    case = bench.Case(
        "relative_attention",
        "tiny",
        {"B": 1, "N": 12, "S": 12, "H": 2, "D": 16, "T": 12},
        "a test",
        {"causal": True, "rel_start": 0},
        ("rel_key", "content_bias", "position_bias"),
        dtypes={"cpu": ("float32",), "cuda": ("float32",)},
    )
    bench.register(case)
    return case
