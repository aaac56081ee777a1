"""The demonstration at a tiny size: it runs whole, its parts are right, and training sees nothing of the validation."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from retro_model import checkpoint, evaluation
from retro_model.apps.demo import command as demo
from retro_model.apps.demo import corpus as demo_corpus
from retro_model.apps.serve.reader import Options, open_folder
from retro_model.data.store import TokenStore
from retro_model.retro import Retro

TINY = dataclasses.replace(demo.SMOKE, steps=4)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return folder, demo.run(folder, demo.SMOKE, quiet=True)


def test_everything_is_there(ran):
    folder, results = ran
    assert {
        "results.json",
        "report.txt",
        "leakage.png",
        "tokenizer.json",
        "deduplication.json",
        "retro",
        "baseline",
    } <= {p.name for p in folder.iterdir()}
    assert set(results["bits_per_byte"]) == {"RETRO on, 2 neighbours", demo.RANDOM, "RETRO off", "baseline"}
    assert all(0 < b < 9 for b in results["bits_per_byte"].values())
    assert results["training"]["RETRO"]["steps"] == results["training"]["baseline"]["steps"] == demo.SMOKE.steps
    assert json.loads((folder / "results.json").read_text())["seed"] == 0
    text = (folder / "report.txt").read_text()
    assert all(f"{b:.4f}" in text for b in results["bits_per_byte"].values())


def test_it_leaves_a_model_folder_and_a_verdict(ran):
    folder, results = ran
    assert len(results["verdicts"]) == 2 and all(
        any(v[:20] in line for line in (folder / "report.txt").read_text().splitlines())
        for v in (results["verdicts"][0][1:], results["verdicts"][1])
    )
    assert results["gains"]["RETRO off"][-1][1] == pytest.approx(results["difference"]["RETRO off"][0])
    assert "Too few to say" in results["verdicts"][0]  # fewer than ten documents
    reader = open_folder(folder)
    assert all(p.keys() >= {"on", "off", "random", "seen"} for p in reader.passages)
    reading = reader.read(reader.passage(reader.start), Options())
    assert reading.cards[0] and reading.documents()[0]["name"] in {entry.name for entry in reader.library.documents}


def test_a_second_run_repeats_the_first(ran, tmp_path):
    _, results = ran
    again = demo.run(tmp_path, demo.SMOKE, quiet=True)
    for key in ("bits_per_byte", "curves", "corpus", "difference"):
        assert json.dumps(again[key]) == json.dumps(results[key]), key
    assert again["training"]["RETRO"]["last_losses"] == results["training"]["RETRO"]["last_losses"]


def test_the_saved_model_scores_as_reported(ran):
    folder, results = ran
    state = checkpoint.read_state(folder / "retro")
    model = Retro(demo.RetroConfig.from_dict(state["config"]))
    checkpoint.load(folder / "retro", model)
    store = TokenStore(folder / "validation")
    scores = evaluation.score(model, store, window=demo.SMOKE.window, stride=demo.SMOKE.stride)
    assert evaluation.bits_per_byte(scores) == pytest.approx(results["bits_per_byte"]["RETRO off"], rel=1e-6)
    assert scores.bytes.sum() == store.num_bytes  # every byte is paid for


def test_validation_is_in_neither_training_nor_database(ran):
    folder, _ = ran
    stores = {name: TokenStore(folder / name) for name in ("train", "all", "validation")}
    groups = {name: {d.group for d in s.documents} for name, s in stores.items()}
    assert groups["validation"] <= set(demo_corpus.VALIDATION) and groups["validation"]
    assert not groups["all"] & set(demo_corpus.VALIDATION) and groups["train"] <= groups["all"]
    assert not any(d.name.removesuffix(".py") in demo_corpus.VALIDATION for d in stores["all"].documents)


def test_neighbours_come_from_other_documents(ran):
    folder, _ = ran
    train, everything = TokenStore(folder / "train"), TokenStore(folder / "all")
    neighbours = np.load(folder / "train-neighbours/neighbours.npy")
    if (folder / "database").exists():
        everything = TokenStore(folder / "database")
    own = [train.documents[d].name for d in train.chunk_doc]
    for row, name in enumerate(own):
        assert name not in {everything.documents[everything.chunk_doc[i]].name for i in neighbours[row] if i >= 0}


def test_groups_are_top_level_names():
    names = ("json/decoder.py", "test/test_json/test_dump.py", "aifc.py")
    assert [demo_corpus.group_of(n) for n in names] == ["json", "test", "aifc"]


def test_minutes_are_those_of_the_whole(monkeypatch):
    """Time that has passed, and time that scoring needs, is not left for training."""

    def seconds(config, corpus, plan, *_, **__):
        return None, {"seconds": plan.steps * (0.5 if config.retrieves else 0.1)}

    monkeypatch.setattr(demo, "fit", seconds)
    monkeypatch.setattr(demo, "_seconds_of_a_pass", lambda *_: 10.0)
    config = demo.RetroConfig.small(512, **demo.SMOKE.config)
    plan, said = demo.within(4, 100.0, None, demo.SMOKE, config, 0, "cpu")
    assert plan.steps == pytest.approx((240 - 100 - 10 * demo.PASSES) / 0.6, abs=1)
    assert said.startswith("about 4.0 min in all: 1.7 passed, 1.0 of training (") and "1.3 of scoring" in said
    least, said = demo.within(1, 600.0, None, demo.SMOKE, config, 0, "cpu")
    assert least.steps == 10 and said.startswith("about 11.4 min in all")  # said beforehand


def test_a_stopped_run_goes_on(tmp_path, monkeypatch):
    """Stopped while it scores: both models are saved, the folder can be served, and nothing is trained again."""
    with monkeypatch.context() as stopped:
        stopped.setattr(demo, "score_all", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            demo.run(tmp_path, TINY, quiet=True, minutes=0.01)
    assert open_folder(tmp_path).folder.facts["verdict"] == "Not scored yet."
    monkeypatch.setattr(demo, "fit", lambda *_, **__: pytest.fail("it trains again"))
    results = demo.run(tmp_path, TINY, quiet=True, minutes=0.01)
    assert len(results["training"]["RETRO"]["last_losses"]) >= 2
    with pytest.raises(pytest.fail.Exception, match="it trains again"):
        demo.run(tmp_path, TINY, seed=1, quiet=True)


def test_the_command_line(monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr(demo, "run", lambda folder, plan, **options: seen.update(folder=folder, plan=plan, **options))
    demo.main(["--out", str(tmp_path), "--smoke", "--seed", "3", "--steps", "5"])
    assert seen == {
        "folder": Path(tmp_path),
        "plan": dataclasses.replace(demo.SMOKE, steps=5, warmup_steps=0),
        "seed": 3,
        "device": "cpu",
        "minutes": None,
    }
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    demo.main(["--device", "cuda", "--minutes", "20"])
    assert seen["plan"] == demo.DEFAULT and seen["device"] == "cuda" and seen["minutes"] == 20


@pytest.mark.parametrize(
    "arguments",
    [
        "--steps 0",
        "--minutes 0",
        "--minutes nan",
        "--seed -1",
        "--device gpu",
        "--device cuda:x",
        "--device cuda:7",
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_prepared(monkeypatch, capsys, arguments):
    monkeypatch.setattr(demo, "run", lambda *_, **__: pytest.fail("it began"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as exit:
        demo.main(["--smoke", *arguments.split()])
    assert exit.value.code == 2 and arguments.split()[0] in capsys.readouterr().err


def test_importing_the_package_loads_no_extras():
    import subprocess
    import sys

    optional = {"tokenizers", "rich", "matplotlib", "safetensors", "faiss"}
    code = f"import sys, retro_model; print(sorted({optional} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "[]", done.stderr


def test_the_model_is_drawn_from_the_seed():
    config = demo.RetroConfig.small(512, **demo.SMOKE.config)
    a, b, c = (demo.make_model(config, demo.SMOKE, seed, "cpu") for seed in (1, 1, 2))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
    assert not torch.equal(a.embedding.weight, c.embedding.weight)
