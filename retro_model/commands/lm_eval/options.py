"""Options of `retro-model lm-eval`."""

from __future__ import annotations

import argparse


def parser() -> argparse.ArgumentParser:
    """Return a parser for the help of `retro-model lm-eval`. The harness parses the options itself."""
    return argparse.ArgumentParser(
        prog="retro-model lm-eval",
        usage="retro-model lm-eval --model_args folder=FOLDER --tasks TASK [TASK ...] [options of lm_eval run]",
        description="""Run EleutherAI's evaluation harness on a trained model.

  retro-model lm-eval --model_args folder=retrofit-out --tasks wikitext lambada_openai
  retro-model lm-eval --model_args folder=retrofit-out,passages=True --include_path . --tasks questions
  retro-model lm-eval ls tasks
  retro-model lm-eval run --help       every option of the harness

folder: a model folder of `retro-model retrofit`. neighbours=0 turns retrieval off; random=True reads random
passages instead of the neighbours. The gain of retrieval is the result minus the result with random=True.
--include_path FOLDER: task files of your own; docs/evaluate.md has two.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
