"""Run this harness on the code of another tree: `python retro_bench/compare/tree.py TREE ROOT FOLDERS ARGUMENTS...`.

`ab` measures an older commit with it, so that harness and checks are the same on both sides. `retro_kernels` comes from
the tree if it lies there, and so does every module that the head imports from its repository, ROOT.
"""

import importlib.util
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
HARNESS = HERE.parent
#: the folder of this harness's `retro_kernels`: the root of a checkout, or site-packages
HOME = next((p for p in HARNESS.parents if (p / "retro_kernels").is_dir()), HARNESS.parent)


def load(tree: Path, root: Path, folders: tuple[str, ...] = ()):
    """Import modules of `root` from `tree` from now on, and return this harness. folders: of plug-ins."""
    tree, root = tree.resolve(), root.resolve()
    kept = [moved(Path(p or ".").resolve(), tree, root) for p in sys.path]
    ours = (tree / "retro_kernels").is_dir()
    paths = [tree, *(tree / folder for folder in folders if not Path(folder).is_absolute()), tree / "src"]
    paths += [p for p in kept if p != HERE and not (ours and p == HOME)]
    paths += map(Path, folders)  # last, so that the tree's own modules come first
    if importlib.util.find_spec("retro_kernels") is None and not ours:
        paths.append(HOME)
    sys.path[:] = dict.fromkeys(str(p) for p in paths if p.exists() or p.suffix)
    import retro_kernels

    loaded = Path(retro_kernels.__file__).resolve().parent.parent
    if ours and loaded != tree:
        raise SystemExit(f"tree: retro_kernels came from {loaded}, not from {tree}")
    if ours and loaded != HOME:  # tolerances, inputs and errors come from the harness
        _package("retro_kernels.testing", HOME / "retro_kernels" / "testing")
    _package(HARNESS.name, HARNESS)
    return sys.modules[HARNESS.name]


def moved(path: Path, tree: Path, root: Path) -> Path:
    """Return the same folder in `tree`, or the folder itself if `tree` lacks it, as it lacks a virtual environment."""
    inside = tree / path.relative_to(root) if path.is_relative_to(root) else path
    return inside if inside.exists() else path


def plug_in(name: str, tree: Path, root: Path) -> None:
    """Import a plug-in. Raises ImportError if a module of `root` was imported instead of the tree's own."""
    importlib.import_module(name)
    if tree.resolve() == root.resolve():
        return
    for module in list(sys.modules.values()):
        file = Path(getattr(module, "__file__", None) or os.devnull)
        if file.is_relative_to(root) and (tree / file.relative_to(root)).exists() and not file.is_relative_to(tree):
            raise ImportError(f"{module.__name__} came from {file}, not from {tree}: is it installed?")


def _package(name: str, folder: Path) -> None:
    file, places = folder / "__init__.py", [str(folder)]
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=places)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def main(argv: list[str]) -> int:
    tree, root, folders, *arguments = argv
    return load(Path(tree), Path(root), tuple(filter(None, folders.split(os.pathsep)))).main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
