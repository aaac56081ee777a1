"""A GPU's clock held at one frequency while something is timed, by nvidia-smi."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

SHARE = 0.8  # of the highest clock: one that a loaded GPU can keep
#: waits until its parent ends, killed or not, and gives the clock back
GUARD = "import subprocess, sys; sys.stdin.read(); subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)"


class Refused(RuntimeError):
    """nvidia-smi is missing or may not set the clock."""


@contextlib.contextmanager
def locked(megahertz: int | None = None) -> Iterator[int]:
    """Hold the GPU's clock; yields its frequency in MHz. A kill of this process gives the clock back, too.

    megahertz: None takes SHARE of the highest. Raises Refused.
    """
    card = ["nvidia-smi", "-i", os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]]
    megahertz = megahertz or int(
        SHARE * int(_ask([*card, "--query-gpu=clocks.max.graphics", "--format=csv,noheader,nounits"]))
    )
    guard = subprocess.Popen(
        [sys.executable, "-c", GUARD, *card, "--reset-gpu-clocks"], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        _ask([*card, f"--lock-gpu-clocks={megahertz},{megahertz}"])
        yield megahertz
    finally:
        guard.stdin.close()
        guard.wait()


def _ask(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise Refused(f"--lock-clocks: {e}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise Refused(f"--lock-clocks: nvidia-smi: {said}; it needs an administrator's rights")
    return done.stdout.strip()
