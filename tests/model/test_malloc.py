"""Freed memory that training keeps."""

import os
import platform
import subprocess
import sys

import pytest

from retro_model import training
from retro_model.training import malloc
from tests.model import toys

COUNTED = """
import importlib.util, resource, sys
import numpy as np
spec = importlib.util.spec_from_file_location("malloc", sys.argv[1])
malloc = importlib.util.module_from_spec(spec)
spec.loader.exec_module(malloc)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        np.empty(12 << 20, np.float32).fill(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
# what lies between the first large blocks may pin them: the least of several
print(faults(), malloc.keep_memory(), min(faults() for _ in range(8)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="keep_memory is glibc's")
@pytest.mark.parametrize("chosen", [False, True], ids=["by itself", "where the environment chose"])
def test_what_is_kept_is_not_mapped_again(chosen):
    env = {name: value for name, value in os.environ.items() if name not in malloc.CHOSEN}
    env |= {"MALLOC_TOP_PAD_": "0"} if chosen else {}
    command = [sys.executable, "-c", COUNTED, malloc.__file__]
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    before, kept, after = said.split()
    assert kept == str(not chosen)
    assert (10 * int(after) < int(before)) == (not chosen)


@pytest.mark.parametrize("told", [False, True])
def test_training_changes_malloc_only_when_told(told, monkeypatch):
    calls = []
    monkeypatch.setattr(malloc, "keep_memory", lambda: calls.append(1))
    model, settings = toys.Bigram(vocab=3), training.Settings(steps=1, warmup_steps=0)
    options = {"stop": 0} | ({"keep_memory": True} if told else {})
    assert training.train(model, training.make_optimizer(model, settings), iter(()), settings, **options) == []
    assert len(calls) == told
