"""The harness: is every kernel right, and how fast is it on this machine? `retro-bench --help`.

A plug-in registers kernels of its own:

    import retro_bench

    retro_bench.register(retro_bench.Contender("relative_attention", "mine", my_function, role="ours"))
    retro_bench.main(["run", "--op", "relative_attention", "--backend", "mine"])
"""

from . import ops
from .registry import CASES, CONTENDERS, OPERATORS, Case, Contender, Operator, Work, register

__all__ = ["CASES", "CONTENDERS", "OPERATORS", "Case", "Contender", "Operator", "Work", "main", "register"]

ops.fill()


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    from .__main__ import main as run

    return run(argv)
