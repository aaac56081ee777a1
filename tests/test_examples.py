"""The examples run as they stand, and show what they say they show."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def example(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cca_in_a_training_step():
    first, last = example("cca_in_a_training_step").main(steps=80)
    assert first > 3 and last < 0.1


@pytest.mark.parametrize("options", [[], ["--autocast", "--checkpoint", "--compile", "aot_eager", "--steps", "3"]], ids=["plain", "all"])
def test_own_gpt_with_cca(options):
    losses = example("own_gpt_with_cca").main(options)
    assert losses[-1] < losses[0]


def test_own_gpt_on_two_processes():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLES / "own_gpt_with_cca.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--ddp", "--steps", "2"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 1") == 1


def test_generate():
    on, off = example("generate").main()
    assert on > 0.9 and off < 0.2


def test_retrofit_llama_trainer():
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    before, after = example("retrofit_llama_trainer").main()
    assert after < before - 0.5


def test_every_example_is_run():
    """A new file gets a test here, of its name."""
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert not [name for name in names if f'example("{name}")' not in Path(__file__).read_text()]


def test_examples_pass_a_type_checker():
    """mypy knows the package by its own annotations (py.typed); what is wrong inside the package is not asked here."""
    pytest.importorskip("mypy")
    # the cache lies where no checkout is dirtied; it makes a second run take a second
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--ignore-missing-imports", "--cache-dir", ROOT / "build" / "mypy"]
    done = subprocess.run([*command, EXAMPLES], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
