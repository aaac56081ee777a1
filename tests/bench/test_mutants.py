"""The maker of single-line faults: what it plants, what it leaves alone, and that its targets exist."""

import ast

import pytest

from tests import trees
from tools.mutants import operators, targets
from tools.mutants.__main__ import sampled_faults

SOURCE = '''
LIMIT = 3


def f(a: int | None = 2, *, b=True) -> bool:
    """1 + 1 == 2"""
    if not a or a < 5 and b is not None:
        raise ValueError(f"expected 1 < {a + 1}")
    return a + 1 in (b, LIMIT)
'''


def test_python_faults_change_one_line_that_computes():
    faults = operators.python(SOURCE)
    lines = {fault.after.strip() for fault in faults}
    assert {
        "if a or a < 5 and b is not None:",
        "if not a and a < 5 and b is not None:",
        "if not a or a <= 5 and b is not None:",
        "if not a or a < 6 and b is not None:",
        "if not a or a < 5 or b is not None:",
        "if not a or a < 5 and b is None:",
        "if a < 5 and b is not None:",
        "if not a:",
        "if not a or b is not None:",
        "if not a or a < 5:",
        "return a - 1 in (b, LIMIT)",
        "return a + 2 in (b, LIMIT)",
        "return a + 1 not in (b, LIMIT)",
    } >= lines - {"return a + 1 not in (b, LIMIT)"}
    assert len(lines) >= 8 and {fault.line for fault in faults} == {7, 9}
    for fault in faults:
        ast.parse(fault.apply(SOURCE))


KEPT = """
def f(plans, key, file, rows):
    key = (key.dtype, key.shape, rows)
    parts: list = [key]
    parts.append(rows)
    os.fsync(file)
    os.replace(file, rows)
    for i in range(2, len(rows)):
        key = other[i, rows]
    return plans[key]
"""


def test_python_faults_of_caches_ranges_and_writes():
    """A key loses a part, a statement is dropped, a range goes one further, a write comes before its sync."""
    faults = {fault.text for fault in operators.python(KEPT)}
    assert {
        "key = (key.dtype, key.shape, rows) -> key = (key.shape, rows)",
        "key = (key.dtype, key.shape, rows) -> key = (key.dtype, rows)",
        "key = (key.dtype, key.shape, rows) -> key = (key.dtype, key.shape)",
        "parts.append(rows) -> pass",
        "os.fsync(file) -> pass",
        "os.replace(file, rows) -> pass",
        "os.fsync(file); os.replace(file, rows) -> os.replace(file, rows); os.fsync(file)",
        "for i in range(2, len(rows)): -> for i in range(2, len(rows) + 1):",
        "for i in range(2, len(rows)): -> for i in range(3, len(rows)):",
    } == faults
    rare = {fault.text for fault in operators.python(KEPT) if fault.rare}
    assert rare == {text for text in faults if "key = (" in text or "; " in text or "+ 1" in text}
    for fault in operators.python(KEPT):
        ast.parse(fault.apply(KEPT))


@pytest.mark.parametrize(
    "key", ["(*shapes, position)", "(needs, [*shapes])", "[shapes, needs]", "(needs, *[(x, y) for x in z])"]
)
def test_a_key_without_a_part_is_still_a_program(key):
    """One part of two leaves a tuple of one; every test would find a fault that does not compile."""
    source = f"def f(plans):\n    key = {key}\n    return plans[key]\n"
    faults = [fault.apply(source) for fault in operators.python(source)]
    for fault in faults:
        compile(fault, "fault", "exec")
    assert len(faults) == 2 + 2 * ("(x, y)" in key)
    assert ("(*shapes,)" in faults[0] + faults[1]) == (key == "(*shapes, position)")


def test_cpp_faults_leave_templates_and_comments_alone():
    source = "template <int N>\nstd::vector<int> v;\nif (i < n && j == 0) x += a * b;  // a < b\n#if N < 3\n"
    cleared = {fault.after for fault in operators.cpp("clear(to, pad(n) + 1), clear(a, b);\nseen.clear();\n")}
    assert {"(void)0, clear(a, b);", "clear(to, pad(n) + 1), (void)0;"} < cleared and "seen.(void)0;" not in cleared
    faults = operators.cpp(source)
    assert {fault.line for fault in faults} == {3}
    assert {f.after.split("  //")[0] for f in faults} == {
        "if (i <= n && j == 0) x += a * b;",
        "if (i < n || j == 0) x += a * b;",
        "if (i < n && j != 0) x += a * b;",
        "if (i < n && j == 0) x -= a * b;",
        "if (i < n && j == 0) x += a + b;",
    }
    assert all(fault.after.endswith("// a < b") for fault in faults)


def test_targets_are_there_and_give_at_least_sixty_faults():
    """The same faults each time; every one can be planted."""
    faults = {target.path: sampled_faults(target, trees.ROOT, 1) for target in targets.TARGETS}
    assert sum(map(len, faults.values())) >= 60
    assert {path.split("/")[0] for path in faults} == {"csrc", "retro_kernels", "retro_model", "bench"}
    for target in targets.TARGETS:
        assert any((trees.ROOT / test).exists() for test in target.tests), target
        source = (trees.ROOT / target.path).read_text()
        assert faults[target.path] == sampled_faults(target, trees.ROOT, 1)
        assert set(faults[target.path]) >= {fault for fault in operators.of(target.path, source) if fault.rare}
        assert all(fault.apply(source) != source for fault in faults[target.path])
