"""The examples run unchanged and show their claims."""

import importlib.util
import inspect
import json
import sys
import typing
from pathlib import Path

import pytest

import retro_kernels as rk
from tests.fresh import ROOT, python
from tests.test_readme import BLOCKS

EXAMPLES = ROOT / "examples"
sys.path.append(str(EXAMPLES))  # as for `python examples/NAME.py`: examples import `baseline`


def example(name: str):
    """Load an example as a module of its own name, as `spec_from_file_location` does."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def of_two_processes(name: str, *words) -> str:
    """Return the output of an example that torchrun starts twice."""
    program = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLES / name)
    return python(*program, *words, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")


def test_cca_in_a_training_step():
    first, last = example("cca_in_a_training_step").main(steps=80)
    assert first > 3 and last < 0.1


@pytest.mark.nightly
def test_own_gpt_with_cca():
    losses, found, control = example("own_gpt_with_cca").main([])
    assert losses[0] > 3.3 and found < 1.5, "it learns to read its neighbours"
    assert control > 3.3, "and random ones tell it nothing"
    # compiled, in bfloat16 autocast and with recomputed activations: the same losses, but for bfloat16's rounding
    together, _, _ = example("own_gpt_with_cca").main(
        ["--autocast", "--checkpoint", "--compile", "aot_eager", "--steps", "3"]
    )
    assert together == pytest.approx(losses[:3], abs=0.02)


def test_own_gpt_in_a_group_of_one_process(monkeypatch, capsys):
    rendezvous = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in rendezvous.items():
        monkeypatch.setenv(name, value)
    losses, *_ = example("own_gpt_with_cca").main(["--ddp", "--steps", "2"])
    assert len(losses) == 2 and capsys.readouterr().out.count("new text") == 1


@pytest.mark.nightly
def test_own_gpt_on_two_processes():
    said = of_two_processes("own_gpt_with_cca.py", "--ddp", "--steps", "2")
    assert said.count("step 1") == 1 and said.count("new text") == 1


def test_model_steps(capsys):
    sizes = ["--vocab_size", "40", "--d_model", "64", "--layers", "1", "--length", "24", "--steps", "3"]
    least = example("model_steps").main(sizes)
    assert set(least) == {"transformer", "Memory Mosaics"} and min(least.values()) > 0
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < losses[1] and losses[-2] < losses[0]


@pytest.mark.nightly
def test_train_many(tmp_path):
    """Two processes, each with half of every sequence, on a sharded database from a pool of two."""
    pytest.importorskip("tokenizers")
    from retro_model.commands import neighbours

    files = str(Path(json.__file__).parent / "*.py")
    sizes = ["--chunk-len", "16", "-k", "3", "--shards", "2", "--key-type", "float16", "--workers", "2"]
    neighbours.main([str(tmp_path), "--documents", files, "--tokenizer", "train:400", *sizes])
    assert example("train_many").parser().parse_args([str(tmp_path)]).steps == 20
    said = of_two_processes("train_many.py", tmp_path, "--sequence", "2")
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in said.splitlines()]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.3
    assert json.loads((tmp_path / "checkpoint" / "state.json").read_text())["step"] == 20


def test_generate():
    on, off = example("generate").main(steps=60)
    assert on > 0.9 and off < 0.2


def test_baseline():
    first, last = example("baseline").main()
    assert last < first / 2


def test_rpt():
    first, last = example("rpt").main(steps=12)
    assert first > 4 and last < first - 0.8


def test_retrofit_llama_trainer():
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    before, after = example("retrofit_llama_trainer").main()
    assert after < before - 0.5


def test_retrofit_accelerate():
    for library in ("transformers", "peft", "accelerate"):
        pytest.importorskip(library)
    first, last = example("retrofit_accelerate").main()
    assert last < first - 0.5


def test_every_example_is_run():
    """A test of this file or of test_experiments.py runs each example."""
    tests = Path(__file__).read_text() + (ROOT / "tests" / "test_experiments.py").read_text()
    assert not [path.stem for path in EXAMPLES.glob("*.py") if f'"{path.stem}"' not in tests]


@pytest.mark.nightly
def test_examples_and_the_documentation_pass_a_type_checker(tmp_path):
    """mypy checks them against the package's annotations (py.typed), but not the package."""
    pytest.importorskip("mypy")
    for number, code in enumerate(BLOCKS.values()):
        (tmp_path / f"block_{number}.py").write_text(code)
    python("-m", "mypy", "--cache-dir", ROOT / "build" / "mypy", EXAMPLES, tmp_path)


@pytest.mark.parametrize("op", [rk.chunked_cross_attention, rk.relative_attention], ids=lambda op: op.__name__)
def test_overloads_have_the_arguments_of_the_function(op):
    """The overloads for a type checker differ in `return_lse` alone."""
    with_lse = []
    for overload in typing.get_overloads(op):
        parameters, expected = inspect.signature(overload).parameters, inspect.signature(op).parameters
        assert list(parameters) == list(expected)
        for name, names in parameters.items():
            here = expected[name]
            assert names.kind == here.kind
            if name == "return_lse":
                with_lse.append(names.annotation)
            else:
                assert names.annotation == here.annotation, name
                assert (names.default is names.empty) == (here.default is here.empty), name
    assert with_lse == ["Literal[False]", "Literal[True]"]
