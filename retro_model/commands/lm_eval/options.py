"""Options of `retro-model lm-eval`."""

from __future__ import annotations

import argparse


def parser() -> argparse.ArgumentParser:
    """Return a parser for the help of `retro-model lm-eval`. The harness parses the options itself."""
    return argparse.ArgumentParser(
        prog="retro-model lm-eval",
        usage="retro-model lm-eval --model_args folder=FOLDER --tasks TASK [TASK ...] [options of lm_eval run]",
        description="""Run EleutherAI's evaluation harness on a trained model.

  retro-model lm-eval --model_args folder=retrofit-out --tasks lambada=lambada.jsonl wikitext103=articles.jsonl
  retro-model lm-eval --model_args folder=retrofit-out,passages=True --tasks question_answering=questions.jsonl
  retro-model lm-eval ls tasks
  retro-model lm-eval run --help       every option of the harness

folder: a model folder of `retro-model retrofit`. neighbours=0 turns retrieval off; random=True reads random
passages instead of the neighbours. The gain of retrieval is the result minus the result with random=True.
NAME=FILE: one of these tasks on a local file. --include_path FOLDER: task files of your own.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
