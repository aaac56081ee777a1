"""RETRO end to end on the sources of Python's standard library: corpus, tokeniser, database, training, evaluation, a sample.

    python -m retro_model demo                                  # about eight minutes on two cores
    python -m retro_model demo --preset 172m --device cuda      # the same code at the paper's sizes

A RETRO and its baseline (the same decoder, no retrieval) take the same number of steps over the same data in the same order; then both
are scored on packages that training never saw.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from retro_model import checkpoint, colouring, evaluation, training
from retro_model.config import RetroConfig
from retro_model.retro import Retro

#: Held out whole: each package or module, and the tests of the same name.
VALIDATION = ("asyncio", "http", "json", "logging", "xml")
#: Tables rather than programs: character maps, help texts, encoded test data.
TABLES = ("encodings", "pydoc_data", "encoded_modules", "codecmaps")
PAD = "<pad>"
