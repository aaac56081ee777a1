"""The harness: is every kernel right, and how fast is it on this machine? `python -m bench --help`.

import bench
bench.register(bench.Contender("relative_attention", "mine", my_function, role="kernel"))
bench.main(["run", "--kernel", "relative_attention", "--backend", "mine"])
"""

from .registry import CASES, CONTENDERS, OPERATORS, Case, Contender, Operator, register

__all__ = ["CASES", "CONTENDERS", "OPERATORS", "Case", "Contender", "Operator", "main", "register"]


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    from .__main__ import main as run

    return run(argv)


def _fill() -> None:
    from . import baselines, cases, operators

    for item in (*operators.operators(), *cases.ALL, *operators.kernels(), *baselines.contenders()):
        register(item)


_fill()
