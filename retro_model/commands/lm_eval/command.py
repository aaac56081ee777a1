"""EleutherAI's evaluation harness with `--model retro`, and the paper's evaluations over local files.

The harness has no entry points for models, so this command registers `retro` and then calls the harness.
`RetroLM.from_folder` takes the model's arguments.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from retro_model.evaluation import tasks

OURS = re.compile(rf"({'|'.join(tasks.TASKS)})=(.+)")


def hand_over(arguments: list[str], folder: Path) -> list[str]:
    """Return the arguments for lm_eval. Write a task file into the folder for each NAME=FILE after `--tasks`.

    Raises: FileNotFoundError for a missing file. ValueError naming a line that cannot be read.
    """
    given, named, written = [], False, False
    for argument in arguments:
        named = argument in ("--tasks", "-t") or (named and not argument.startswith("-"))
        parts = argument.split(",") if named else []
        for at, part in enumerate(parts):
            if ours := OURS.fullmatch(part):
                task = tasks.TASKS[ours[1]](Path(ours[2]).resolve())
                tasks.write_yaml(task, folder)
                parts[at], written = task["task"], True
        given.append(",".join(parts) if parts else argument)
    if written:
        theirs = []  # the user's folder comes first in the option that names this command's folder
        if "--include_path" in given[:-1]:
            at = given.index("--include_path")
            _, *theirs = given[at : at + 2]
            del given[at : at + 2]
        given += ["--include_path", ":".join([*theirs, str(folder)])]
    if "--tasks" in given and not {"--model", "-M", "--config", "-C"} & {*given}:
        given += ["--model", "retro"]
    return given


def main(arguments: list[str] | None = None) -> None:
    """Run `retro-model lm-eval`."""
    arguments = sys.argv[2:] if arguments is None else arguments
    try:
        from lm_eval.__main__ import cli_evaluate

        import retro_model.integrations.lm_eval  # noqa: F401  registers `retro`
    except ImportError as error:
        sys.exit(f"{error}; pip install 'retro-kernels[harness]'")
    before = sys.argv
    with tempfile.TemporaryDirectory(prefix="retro-tasks-") as folder:
        try:
            try:
                sys.argv = ["lm-eval", *hand_over(arguments, Path(folder))]
            except ValueError as error:
                sys.exit(f"retro-model lm-eval: {error}")
            cli_evaluate()
        except FileNotFoundError as error:
            sys.exit(f"retro-model lm-eval: {error}")
        finally:
            sys.argv = before
