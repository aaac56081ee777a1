"""Find the ops that a set of changed files can affect on a CPU, for `ab --from-diff`.

A file with an operator's name belongs to that operator. A C++ header belongs to the operators that include it. Other
code of the kernels belongs to all operators. The static half of `ab` compares Triton and CUDA sources.
"""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

CODE = ("retro_kernels/", "csrc/", "setup.py", "tools/build_extensions.py", "pyproject.toml")
#: parts of CODE that no CPU kernel runs
UNRELATED = ("retro_kernels/triton_lib/", "retro_kernels/compile/", "csrc/cuda/", "csrc/text/")
#: files of an op's folder that only other backends run
ELSEWHERE = re.compile(r"retro_kernels/ops/\w+/(triton/.*|cuda\.py|tiles\.json|cases\.py)")
INCLUDE = re.compile(r'#include "([^"]+)"')


def commit(ref: str, root: Path) -> str:
    """Return the hash of the commit that `ref` means in the repository `root`. Raises ValueError if git knows none."""
    # arguments behind --end-of-options are never parsed as options of git
    command = ["git", "-C", str(root), "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if not ref or done.returncode:
        kinds = "a commit, branch or tag, or the folder of another tree"
        raise ValueError(f"--base {ref!r}: expected {kinds}; git knows no such commit")
    return done.stdout.strip()


def changed_files(root: Path, ref: str) -> list[str]:
    """Return the paths that differ between `ref` and the working tree, untracked ones included."""
    paths, sha = [], commit(ref, root)
    for command in (["diff", "--name-only", sha, "--"], ["ls-files", "--others", "--exclude-standard"]):
        done = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"--base {ref}: {done.stderr.strip().splitlines()[0]}")
        paths += done.stdout.splitlines()
    return paths


def ops(files: Iterable[str], operators: Iterable[str], root: Path) -> set[str]:
    """Return the operators that `files` can affect."""
    operators = tuple(operators)
    touched: set[str] = set()
    for path in files:
        if path.startswith(UNRELATED) or not path.startswith(CODE) or ELSEWHERE.fullmatch(path):
            continue
        places = (Path(path).name, Path(path).parent.name)
        own = {name for name in operators if name in places or name in Path(path).stem}
        if not own and path.startswith("csrc/cpu/") and path.endswith(".h"):
            own = {name for name in operators if path in _headers(name, root)}
        touched |= own or set(operators)
    return touched


def _headers(operator: str, root: Path) -> set[str]:
    """Return the headers that the operator's C++ sources include, directly or not."""
    headers: set[Path] = set()
    left = list((root / "csrc" / "cpu").glob(f"{operator}*.cpp"))
    while left:
        path = left.pop()
        for name in INCLUDE.findall(path.read_text()):
            header = (path.parent / name).resolve()
            if header.exists() and header not in headers:
                headers.add(header)
                left.append(header)
    return {path.relative_to(root.resolve()).as_posix() for path in headers}
