"""EleutherAI's evaluation harness with `--model retro`.

The harness has no entry points for models, so this command registers `retro` and then calls the harness.
`RetroLM.from_folder` takes the model's arguments.
"""

from __future__ import annotations

import sys


def hand_over(arguments: list[str]) -> list[str]:
    """Return the arguments for lm_eval, with `--model retro` unless they name a model or run nothing."""
    names_model = {"--model", "-M", "--config", "-C"} & {*arguments}
    return arguments if names_model or "--tasks" not in arguments else [*arguments, "--model", "retro"]


def main(arguments: list[str] | None = None) -> None:
    """Run `retro-model lm-eval`."""
    arguments = sys.argv[2:] if arguments is None else arguments
    try:
        from lm_eval.__main__ import cli_evaluate

        import retro_model.integrations.lm_eval  # noqa: F401  registers `retro`
    except ImportError as error:
        sys.exit(f"{error}; pip install 'retro-kernels[harness]'")
    before = sys.argv
    try:
        sys.argv = ["lm-eval", *hand_over(arguments)]
        cli_evaluate()
    except FileNotFoundError as error:
        sys.exit(f"retro-model lm-eval: {error}")
    finally:
        sys.argv = before
