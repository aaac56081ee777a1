"""Test the CPU kernels on an emulated 64-bit ARM processor: `python -m tools.arm [ISA ...]`.

For each instruction set the kernels are compiled (about a minute of one core) and compared with the float64 reference,
on the cases of `tools.arm.cases`. `tests/ops` does so on the processor at hand.
"""

import argparse
import sys
import time
from unittest import mock

from retro_kernels.core import native, plan
from retro_kernels.testing import compare

from . import cases, emulated

FOLDER = emulated.ROOT / "build" / "arm"


def run(isa: str) -> int:
    """Return the number of cases that failed."""
    begun = time.monotonic()
    extension = emulated.Extension(emulated.build(isa, FOLDER), isa)
    print(f"{isa}: compiled in {time.monotonic() - begun:.0f} s", flush=True)
    failed = count = 0
    with mock.patch.object(native, "extension", lambda name: extension):
        plan.forget()  # plans hold functions of the extension
        extension.check_primitives()
        for name, op, arguments in cases.every():
            count += 1
            try:
                compare.check(op, arguments, "cpu")
            except (AssertionError, RuntimeError) as error:
                failed += 1
                print(f"{isa}: {op} {name}: {error}", flush=True)
    print(f"{isa}: {count - failed} of {count} cases passed, {extension.calls} calls", flush=True)
    extension.close()
    return failed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.arm", description=__doc__.split("\n\n")[0])
    parser.add_argument("isas", nargs="*", default=emulated.ISAS, metavar="ISA", help="test these instruction sets")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.isas) - set(emulated.ISAS):
        parser.error(f"expected some of {', '.join(emulated.ISAS)}; got {', '.join(sorted(unknown))}")
    if why := emulated.missing():
        print(f"not run: {why}")
        return 1
    return int(sum(run(isa) for isa in arguments.isas) > 0)


if __name__ == "__main__":
    sys.exit(main())
