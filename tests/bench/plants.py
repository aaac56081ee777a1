"""Faults to plant in a copy of this tree, which the gates must find; `tests/bench/proof.py` and tests/bench use them.

Each is one replacement in one file. The old text must occur exactly once, so an outdated plant is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from retro_bench.records import environment
from tests import trees

LOGITS, LEAKY = (
    "retro_kernels/ops/relative_logits/triton/kernels.py",
    "retro_kernels/ops/leaky_average/triton/kernels.py",
)
CPU = "csrc/cpu/topk_chunks.cpp"


@dataclass(frozen=True)
class Plant:
    """`old` becomes `new` in `path`. `caught_as`: words of the static regression; "" if there must be none."""

    name: str
    path: str
    old: str
    new: str
    include: str = ""  # a header that `new` needs
    launch: str = ""  # part of the id of one changed launch
    caught_as: str = ""

    def apply(self, tree: Path) -> None:
        path = tree / self.path
        trees.replace(path, self.old, self.new)
        if self.include:
            path.write_text(f"#include <{self.include}>\n" + path.read_text())


HINT = Plant(
    "lost divisibility hint",
    LOGITS,
    "@triton.jit(do_not_specialize=SIZES)\ndef _logits_query_kernel(",
    '@triton.jit(do_not_specialize=(*SIZES, "rel_ptr"))\ndef _logits_query_kernel(',
    launch="logits_query:head:sm90/bfloat16",
    caught_as="asynchronous copies gone",
)
EXP = Plant(
    "an exp more in a loop",
    LEAKY,
    "    return y + before\n",
    "    return tl.exp(y) + before\n",
    launch="leaky_scan:wide:sm90/bfloat16",
    caught_as="hot loop",
)
SPILL = Plant(
    "a configuration that spills",
    "retro_kernels/ops/relative_logits/tiles.json",
    '{"kernel": "forward", "arch": 90, "bytes": 2, "width": 128, "rows": 1073741824, "block_m": 64, "block_n": 64, '
    '"num_warps": 4,',
    '{"kernel": "forward", "arch": 90, "bytes": 2, "width": 128, "rows": 1073741824, "block_m": 64, "block_n": 64, '
    '"num_warps": 1,',
    launch="logits_forward:wide:sm90/bfloat16",
    caught_as="spills",
)
VANISHED = Plant(
    "a kernel that vanished",
    "retro_kernels/ops/leaky_average/triton/__init__.py",
    '{"wide": (16, 2048, 16, 64), "long": (1, 16384, 8, 128)}',
    '{"wide": (16, 2048, 16, 64)}',
    launch="leaky_ends:long:sm90/bfloat16",
    caught_as="no longer compiled",
)
HARMLESS = Plant(
    "a comment and a variable's name",
    LOGITS,
    """            total += tl.dot(grad, q, input_precision=PRECISION)
""",
    """            across = grad  # displacements in front
            total += tl.dot(across, q, input_precision=PRECISION)
""",
    launch="logits_table:head:sm90/bfloat16",
)
WRONG = Plant(
    "a result wrong by a part in ten thousand",
    "retro_kernels/ops/leaky_average/cpu.py",
    "    return (y,)\n",
    "    return (y.mul_(1.0001),)\n",
)
STATIC = (HINT, EXP, SPILL, VANISHED, HARMLESS)


def slower(percent: int) -> Plant:
    """Make the C++ kernel idle for this share of its own time."""
    old = "  by_type(query.type, [&](auto t) { forward<decltype(t)>(p, out, threads); });\n"
    wait = f"""  const auto begun = std::chrono::steady_clock::now();
{old}  const auto end = begun + (std::chrono::steady_clock::now() - begun) * {100 + percent} / 100;
  while (std::chrono::steady_clock::now() < end) {{
  }}
"""
    return Plant(f"a C++ kernel slower by {percent}%", CPU, old, wait, include="chrono")


def copy_tree(to: Path, like: Path = environment.ROOT) -> Path:
    """Make a git repository of the working tree `like`, with uncommitted files and built extensions."""
    return trees.commit(trees.copy(to, like))
