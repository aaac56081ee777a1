"""Resolve a user's ref to a commit hash. Arguments are never parsed as options of git."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit(ref: str, root: Path) -> str:
    """Return the hash of the commit that `ref` means in the repository `root`. Raises ValueError if git knows none."""
    command = ["git", "-C", str(root), "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if not ref or done.returncode:
        raise ValueError(
            f"--base {ref!r}: expected a commit, branch or tag, or the folder of another tree; git knows no such commit"
        )
    return done.stdout.strip()
