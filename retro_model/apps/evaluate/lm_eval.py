"""EleutherAI's harness with our models in it, `--model retro`, and the paper's evaluations over local files.

    retro-model lm-eval --model_args folder=demo-out --tasks lambada=lambada.jsonl wikitext103=articles.jsonl
    retro-model lm-eval --model_args folder=demo-out,passages=True --tasks question_answering=questions.jsonl
    retro-model lm-eval ls tasks            # lm_eval's own commands, options and tasks, as `lm_eval` takes them

The harness has no entry points for models: it finds those that are registered when it starts, so this command registers
ours and hands everything else over. folder: what `retro-model demo` or `retrofit` left. `--model retro` is the default;
other arguments of the model are those of `RetroLM.from_folder`.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from retro_model.evaluation import tasks

OURS = re.compile(rf"({'|'.join(tasks.TASKS)})=(.+)")


def hand_over(arguments: list[str], folder: Path) -> list[str]:
    """lm_eval's arguments for ours: NAME=FILE after `--tasks` is a task that is written into the folder.

    Raises: FileNotFoundError for a file that is not there.
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
        given += _included(given, folder)
    if "--tasks" in given and not {"--model", "-M", "--config", "-C"} & {*given}:
        given += ["--model", "retro"]
    return given


def _included(given: list[str], folder: Path) -> list[str]:
    """The option that names the folder; a folder of the user's is taken out of `given` and stays first."""
    theirs = []
    if "--include_path" in given[:-1]:
        at = given.index("--include_path")
        theirs = [given.pop(at + 1)]
        del given[at]
    return ["--include_path", ":".join([*theirs, str(folder)])]


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    arguments = sys.argv[2:] if arguments is None else arguments
    try:
        from lm_eval.__main__ import cli_evaluate

        import retro_model.integrations.lm_eval  # noqa: F401  registers `retro`
    except ImportError as error:
        sys.exit(f"{error}; pip install 'retro-kernels[harness]'")
    before = sys.argv
    with tempfile.TemporaryDirectory(prefix="retro-tasks-") as folder:
        try:
            sys.argv = ["lm-eval", *hand_over(arguments, Path(folder))]
            cli_evaluate()
        except FileNotFoundError as error:
            sys.exit(f"retro-model lm-eval: {error}")
        finally:
            sys.argv = before
