"""Run the harness of this tree on the kernels of another: `python bench/compare/tree.py TREE ARGUMENTS...`.

`ab` measures an older commit with it: the harness, its cases and its checks are the same on both sides, only
`retro_kernels` differs.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
HARNESS = HERE.parent  # `bench` in a checkout, `retro_bench` where it is installed
ROOT = HARNESS.parent
BEFORE_THE_MOVE = {
    "core.backends": "_dispatch",
    "core.native": "_native",
    "core.eager": "_eager",
    "compile.target": "_target",
    "compile.configs": "configs",
    "compile.aot": "aot",
    "reference_lib.attention": "reference._attention",
}


def load(tree: Path):
    """The harness of this file, with `retro_kernels` imported from `tree`."""
    sys.path[:] = [str(tree), *(p for p in sys.path if Path(p or ".").resolve() not in (HERE, ROOT))]
    import retro_kernels

    loaded = Path(retro_kernels.__file__).resolve().parent.parent
    if loaded != tree.resolve():
        raise SystemExit(f"tree: retro_kernels came from {loaded}, not from {tree}")
    _alias_before_the_move(tree)
    _package(
        "retro_kernels.testing", ROOT / "retro_kernels" / "testing"
    )  # tolerances, inputs and errors are this tree's
    _package(HARNESS.name, HARNESS)
    return sys.modules[HARNESS.name]


def _alias_before_the_move(tree: Path) -> None:
    """Names under which this harness imports what a tree before version 0.10 keeps elsewhere."""
    if (tree / "retro_kernels" / "compile").is_dir():
        return
    for new, old in BEFORE_THE_MOVE.items():
        package, _, name = f"retro_kernels.{new}".rpartition(".")
        parent = sys.modules.setdefault(package, types.ModuleType(package))
        sys.modules[f"{package}.{name}"] = module = importlib.import_module(f"retro_kernels.{old}")
        setattr(parent, name, module)


def _package(name: str, folder: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


if __name__ == "__main__":
    sys.exit(load(Path(sys.argv[1])).main(sys.argv[2:]))
