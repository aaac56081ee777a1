"""Rules of the tree: imports, side effects of importing, form."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import retro_kernels as rk
from retro_kernels.core import dispatch
from tests import trees
from tests.conftest import INTERPRETED_AT_NIGHT

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "retro_kernels"
MODELS = ROOT / "retro_model"
#: A module of retro_model imports from its own level and from lower ones. Unlisted parts form the top level.
LEVELS = (
    {"base"},
    {"layers", "data"},
    {"retro", "memory_mosaics", "rpt"},
    {"retrofit"},
    {"generation", "training", "evaluation"},
)
#: Packages that the files of a folder may import, of those in this tree. The emulator is optional for the harness.
ARROWS = {
    "retro_kernels": {"retro_kernels"},
    "ptx_emulator": {"ptx_emulator"},
    "retro_model": {"retro_model", "retro_kernels"},
    "bench/retro_bench": {"retro_bench", "retro_kernels", "retro_model", "ptx_emulator"},
    "demos/reader/retro_reader": {"retro_reader", "retro_model", "retro_kernels"},
}
#: Lines of code of each folder, without the folders below it that have a budget themselves.
BUDGETS = {
    "csrc": 7_500,  # with csrc/text
    "retro_kernels": 9_100,
    "retro_kernels/core": 900,
    "retro_model": 15_000,
    "bench/retro_bench": 8_000,
    "ptx_emulator": 6_000,
    "ptx_emulator/tests": 2_800,
    "bench/foreign": 900,  # calls of other projects' kernels, for the table of the README of ptx_emulator
    "demos/reader": 1_900,
    "demos/reader/tests": 1_000,
    "examples": 1_700,
    "tools": 650,  # 350, and 300 that build the extensions
    "tests": 25_000,
}
CODE = (".py", ".h", ".cpp", ".cu", ".cuh", ".css", ".js", ".html", ".sh")
BACKENDS = ("triton", "cuda", "cpu", "reference")
LIBRARIES = ("triton_lib", "cpu_lib", "reference_lib")
#: parts of retro_model that load nothing optional
LIGHT = ("retro", "retrofit", "layers", "generation", "training", "evaluation")
MOST_ARGUMENTS = 7  # arguments that the formatter puts one a line; functions of Triton kernels have more, in rows
ATTENTIONS = ("relative_attention", "chunked_cross_attention")
#: operations of their kernels that make a tile
TILE_OPERATIONS = (
    *("dot", "product", "deep_product", "tile_product", "table_product", "position_logits", "scalar_position"),
    *("load_rows", "load_query", "load_queries", "load_keys", "load_band", "rel_rows", "reverse_skew", "walk_step"),
    *("row_products", "skewed_block"),
)
#: functions that hand named arguments on: to a configuration, a figure, an op, the model
FORWARDING = ("retrofit", "retrofit_rpt", "gathered_attention", "generate")
SOURCES = ("retro_kernels", "retro_model", "bench", "tests", "tools", "examples", "demos")
NAMED = (".py", ".cpp", ".cu", ".cuh", ".h", ".md", ".toml", ".sh", ".yml", ".json", ".jsonl", ".ipynb", ".cff", ".svg")


def imported(path: Path) -> set[str]:
    """Return absolute names of the modules that a file imports, function bodies included."""
    package = list(path.relative_to(ROOT).parts[:-1])
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            names |= {".".join([*base, alias.name]) for alias in node.names}
    return names


def backend_files() -> list[Path]:
    named = [path for backend in BACKENDS for path in PACKAGE.glob(f"ops/*/{backend}.py")]
    return sorted([*named, *PACKAGE.glob("ops/*/triton/**/*.py"), *PACKAGE.glob("*_lib/*.py")])


@pytest.mark.parametrize("path", backend_files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_backends_never_import_what_stands_on_them(path):
    """Backends import neither a public function nor the operator."""
    upward = [f"retro_kernels.core.{name}" for name in ("call", "operator", "dispatch")]
    upward += [f"retro_kernels.ops.{op}.{op}" for op in dispatch.OPS]
    assert not [name for name in imported(path) if name.startswith(tuple(upward))]


@pytest.mark.parametrize(
    "path", [p for p in backend_files() if "reference" in str(p.relative_to(PACKAGE))], ids=lambda p: p.parent.name
)
def test_the_reference_imports_only_torch(path):
    own = ("retro_kernels.reference_lib", "retro_kernels.core.private")
    roots = {name.split(".")[0] for name in imported(path) if not name.startswith(own)}
    assert roots <= {"torch", "__future__", "collections", "math"}


@pytest.mark.parametrize("folder", ARROWS)
def test_packages_import_downwards(folder):
    """A package imports itself and the packages below it, and `ptx_emulator` imports none of the others."""
    every = {package for below in ARROWS.values() for package in below} | {"tests", "examples", "tools"}
    paths = sorted((ROOT / folder).rglob("*.py"))
    found = {path: {name.split(".")[0] for name in imported(path)} & every for path in paths}
    assert paths and not [(path, names - ARROWS[folder]) for path, names in found.items() if names - ARROWS[folder]]


def test_the_models_use_only_public_names_of_the_ops():
    private = ("retro_kernels._", *(f"retro_kernels.{part}" for part in ("core", *LIBRARIES)))
    for path in MODELS.rglob("*.py"):
        names = imported(path) - {"retro_kernels.__version__"}
        assert not [name for name in names if name.startswith(private)], path


def test_only_commands_import_commands():
    commands = MODELS / "commands"
    for path in [*MODELS.rglob("*.py"), *(ROOT / "bench").rglob("*.py"), *(ROOT / "demos").rglob("*.py")]:
        if commands not in path.parents and path != MODELS / "__main__.py":
            assert not [name for name in imported(path) if name.startswith("retro_model.commands")], path


def test_tests_that_are_interpreted_at_night_exist():
    for entry in INTERPRETED_AT_NIGHT:
        file, name = entry.partition("[")[0].split("::")
        assert f"def {name}(" in (ROOT / "tests" / "ops" / file).read_text(), entry


@pytest.mark.parametrize("folder", BUDGETS)
def test_a_folder_stays_within_its_budget(folder):
    """Lines of code, at most 10% above the budget of the folder. Tests of a package have a budget of their own."""
    inner = [other for other in BUDGETS if other.startswith(f"{folder}/")]
    names = [name for name in trees.names() if name.startswith(f"{folder}/") and Path(name).suffix in CODE]
    names = [name for name in names if not name.startswith(tuple(f"{other}/" for other in inner))]
    lines = sum(len((ROOT / name).read_bytes().splitlines()) for name in names)
    assert 0 < lines <= 1.1 * BUDGETS[folder], f"{folder}: {lines} lines"


def test_the_guides_have_at_most_16_000_words():
    assert 0 < sum(len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").glob("*.md")) <= 16_000


#: the one file of each library's undocumented names, and the form of these names
PRIVATE = {
    "core/private.py": re.compile(
        r"torch(\.\w+)*\._(?!_)\w+|forward_ad\._|\._cdata|torch\.utils\._\w+|from torch[\w.]*\._\w+ import"
        r"|from torch[\w.]* import .*\b_\w+"
    ),
    "compile/triton_private.py": re.compile(r"triton\.(runtime|backends|compiler)|\._pack_args"),
}


@pytest.mark.parametrize("file", PRIVATE)
def test_the_private_names_of_a_library_are_in_one_file(file):
    found = {
        path: [name.group() for name in PRIVATE[file].finditer(path.read_text())]
        for path in [*PACKAGE.rglob("*.py"), *MODELS.rglob("*.py")]
    }
    assert [path for path, names in found.items() if names] == [PACKAGE / file], found


def test_few_lines_of_the_core_use_private_names_of_torch():
    lines = (PACKAGE / "core" / "private.py").read_text().splitlines()
    assert 0 < len([line for line in lines if PRIVATE["core/private.py"].search(line)]) <= 60


def level(module: str) -> int:
    """Return the level of a module such as "retro_model.layers.attention"."""
    part = module.split(".")[1]
    return next((number for number, parts in enumerate(LEVELS) if part in parts), len(LEVELS))


def model_modules() -> dict[str, set[str]]:
    """Return the modules of retro_model, each with the others that it imports."""
    names = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in MODELS.rglob("*.py")
    }

    def existing(name: str) -> str:
        while name and name not in names:
            name = name.rpartition(".")[0]
        return name

    return {
        name: {existing(name_of) for name_of in imported(path) - {"retro_model._text"}} - {"", name}
        for name, path in names.items()
    }


def test_the_models_import_downwards():
    """Layers know no model, models no training, and no module imports the whole package."""
    upward = [
        f"{name} imports {other}"
        for name, others in model_modules().items()
        for other in others
        if name != "retro_model" and level(name) < (len(LEVELS) if other == "retro_model" else level(other))
    ]
    assert not upward


def test_the_models_import_in_no_circle():
    left = {
        name: {o for o in others if o != "retro_model"}
        for name, others in model_modules().items()
        if name != "retro_model"
    }
    for name, others in left.items():  # a package's __init__ imports its modules, which import each other but not it
        left[name] = {o for o in others if not name.startswith(f"{o}.")}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert not left


IMPORTS = f"""
import os, sys, torch
known, environ = set(sys.modules), dict(os.environ)
import retro_kernels
assert not [m for m in set(sys.modules) - known if m.startswith("retro_kernels._c")], "an extension was loaded"
assert not torch.cuda.is_initialized(), "CUDA was initialised"
assert dict(os.environ) == environ, "the environment was written"
import retro_model, {", ".join(f"retro_model.{m}" for m in LIGHT)}
print(sorted(set(sys.argv[1:]) & (set(sys.modules) - known)))
"""
OPTIONAL = ("triton", "transformers", "tokenizers", "faiss", "bm25s", "datasketch", "safetensors", "rich", "matplotlib")


def test_importing_loads_nothing_optional_and_touches_no_device():
    """Tokenisers, indexes and plots load at their first use: a single layer needs none of them."""
    done = subprocess.run([sys.executable, "-c", IMPORTS, *OPTIONAL], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_an_op_is_a_folder():
    assert {path.parent.name for path in PACKAGE.glob("ops/*/__init__.py")} == set(dispatch.OPS)
    for op in dispatch.OPS:
        assert (PACKAGE / "ops" / op / "reference.py").exists() and op in rk.__all__


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_module_serves_the_protocol(backend):
    """The sources are parsed, because triton may not be installed."""
    for op in dispatch.OPS:
        path = PACKAGE / "ops" / op / f"{backend}.py"
        path = path if path.exists() else path.with_suffix("") / "__init__.py"
        if not path.exists():
            continue
        tree = ast.parse(path.read_text()).body
        names = {n.name for n in tree if isinstance(n, ast.FunctionDef)}
        names |= {t.id for n in tree if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
        names |= {a.asname or a.name for n in tree if isinstance(n, ast.ImportFrom) for a in n.names}
        protocol = {"forward", "backward"} if backend == "reference" else {"unsupported", "forward", "backward"}
        assert protocol <= names, path


@pytest.mark.parametrize(
    "path",
    [p for f in ATTENTIONS for p in sorted(PACKAGE.glob(f"ops/{f}/triton/*.py"))],
    ids=lambda p: p.parent.name + p.stem,
)
def test_tiles_of_the_attentions_have_a_shape_beside_them(path):
    """`# [BLOCK_M, BLOCK_N]` at the statement or above it."""
    if not path.stem.startswith(("forward", "backward", "band")):
        return
    lines, bare = path.read_text().splitlines(), []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            calls = [c.func for c in ast.walk(node.value) if isinstance(c, ast.Call)]
            names = {c.attr if isinstance(c, ast.Attribute) else getattr(c, "id", None) for c in calls}
            beside = lines[max(0, node.lineno - 2) : node.end_lineno]
            if names & set(TILE_OPERATIONS) and not any("# [" in line for line in beside):
                bare.append(f"{path.name}:{node.lineno}: {lines[node.lineno - 1].strip()}")
    assert not bare


def misplaced(sources: list[str]) -> list[str]:
    """Return positional arguments of long calls that have the name of another parameter of the called function."""
    parsed = [node for source in sources for node in ast.walk(ast.parse(source))]
    takes: dict[str, list[list[str]]] = {}
    for node in parsed:
        if isinstance(node, ast.FunctionDef):
            takes.setdefault(node.name, []).append([argument.arg for argument in node.args.args])
    calls = [node for node in parsed if isinstance(node, ast.Call) and len(node.args) > 8]
    found = []
    for call in [c for c in calls if isinstance(c.func, ast.Name) and len(takes.get(c.func.id, ())) == 1]:
        (names,) = takes[call.func.id]
        given = dict(zip(names, [getattr(argument, "id", None) for argument in call.args], strict=False))
        # a value may be given twice, for its own parameter and for another one
        wrong = [(at, name) for at, name in given.items() if name in given and name not in (at, given[name])]
        found += [f"{call.func.id}: {name} at {at}" for at, name in wrong]
    return found


def test_arguments_of_device_functions_are_at_the_places_of_their_names():
    """Triton's device functions take up to 54 arguments by position, and a swap of two would compile."""
    paths = [*PACKAGE.glob("ops/*/triton/*.py"), *PACKAGE.glob("triton_lib/*.py")]
    assert len(paths) > 30 and not misplaced([path.read_text() for path in paths])
    long = ", ".join("abcdefghi")
    assert misplaced([f"def f({long}): pass", f"f(b, a, {long[6:]})"]) == ["f: b at a", "f: a at b"]


def test_only_rows_of_many_arguments_escape_the_formatter():
    escapes = []
    for path in [p for folder in SOURCES for p in (ROOT / folder).rglob("*.py") if "fmt: " + "skip" in p.read_text()]:
        ends = {}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                ends[node.body[0].lineno] = len(node.args.args)
            if isinstance(node, ast.Call):
                ends[node.end_lineno + 1] = max(ends.get(node.end_lineno + 1, 0), len(node.args))
        for number, line in enumerate(path.read_text().splitlines(), 1):
            following = [ends[n] for n in (number + 1, number + 2, number + 3) if n in ends]
            if line.endswith("# fmt: " + "skip") and max(following, default=0) <= MOST_ARGUMENTS:
                escapes.append(f"{path.relative_to(ROOT)}:{number}")
    assert not escapes


def test_nothing_names_a_machine():
    """No absolute path of a machine in the tracked sources."""
    bad, seen = [], 0
    for folder, below, names in os.walk(ROOT):
        below[:] = [name for name in below if name not in (".venv", ".cache", "build", "out", ".git")]
        for path in [Path(folder, name) for name in names if Path(name).suffix in NAMED]:
            if path.name == "compile_commands.json":  # written by the build, for editors
                continue
            text, seen = path.read_text(errors="replace"), seen + 1
            bad += [
                f"{path.relative_to(ROOT)}: {needle}"
                for needle in ("/" + "home/", "/" + "root/", "/" + "Users/")
                if needle in text
            ]
    assert not bad and seen > 400


@pytest.mark.parametrize(
    "page", [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], ids=lambda p: str(p.relative_to(ROOT))
)
def test_a_page_can_be_read(page):
    """Guides have at most 180 lines; prose has at most 160 characters a line. Tables and code may be wider."""
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M).splitlines()
    assert not [line for line in prose if len(line) > 160 and not line.lstrip().startswith("|")]
    if page.parent == ROOT / "docs":
        assert len(text.splitlines()) <= 180


def test_the_api_pages_have_every_public_name():
    """A page renders the names of a package's `__all__`, or of its modules where it has none; the ops' are listed."""
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md")}
    listed = re.search(r"members: \[(.*?)\]", pages["retro_kernels"], re.S)[1].split(",")
    assert {name.strip() for name in listed} == set(rk.__all__) - {"__version__"}
    shown = set(re.findall(r"^::: (\S+)", "\n".join(pages.values()), re.M))
    public = {
        f"retro_model.{path.parent.name}" for path in MODELS.glob("*/__init__.py") if "__all__" in path.read_text()
    }
    assert public - {"retro_model.base", "retro_model.commands"} <= shown
    assert {f"retro_model.integrations.{path.stem}" for path in MODELS.glob("integrations/[a-z]*.py")} <= shown


def test_a_public_constructor_tells_types_and_defaults():
    """The API pages show signatures: a class or function of `__all__` takes no `**options`, and an optional argument of
    a class has its type; `device`, `dtype` and `backend` mean the same everywhere.
    """
    untold = []
    for package in [path.parent.name for path in MODELS.glob("*/__init__.py") if "__all__" in path.read_text()]:
        module = importlib.import_module(f"retro_model.{package}")
        for name in set(module.__all__) - set(FORWARDING):
            entry = getattr(module, name)
            is_class = inspect.isclass(entry)
            if (not is_class and not inspect.isfunction(entry)) or getattr(entry, "_is_protocol", False):
                continue
            for argument in inspect.signature(entry).parameters.values():
                optional = argument.default is not argument.empty
                typed = argument.annotation is not argument.empty or argument.name in ("device", "dtype", "backend")
                if argument.kind is argument.VAR_KEYWORD or (is_class and optional and not typed):
                    untold.append(f"retro_model.{package}.{name}({argument})")
    assert not untold


def test_decisions_are_short_and_listed():
    """A record has at most 250 words and a status; the index lists every record, and numbers are not used twice."""
    folder = ROOT / "docs" / "decisions"
    index = (folder / "index.md").read_text(encoding="utf-8")
    records = sorted(folder.glob("[0-9]*.md"))
    for record in records:
        text = record.read_text(encoding="utf-8")
        assert re.match(rf"# {record.name[:3]} .+\n\nStatus: (accepted|replaced) \d{{4}}-\d\d-\d\d", text), record.name
        assert len(text.split()) <= 250, record.name
        assert f"({record.name})" in index, record.name
    assert len({record.name[:3] for record in records}) == len(records) >= 20
