"""Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def python(*words, cwd: Path = ROOT, **environment: str) -> str:
    """Run Python with these words, which must succeed, and return its output. environment: additional variables."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
