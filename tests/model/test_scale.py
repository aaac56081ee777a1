"""`retro-model scale`: plans before it starts, builds on a cluster, trains two processes, continues."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from retro_model.apps.scale import command, plan
from retro_model.apps.scale.build import build, opened
from retro_model.apps.scale.recipe import Recipe, Synthetic, synthetic_sources
from retro_model.data.embed import HashedTfidf
from retro_model.data.tokens import Tokenizer
from tests.conftest import INTERPRETER

needs_gloo = pytest.mark.skipif(
    INTERPRETER or not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
)


@needs_gloo
def test_one_command_builds_on_a_cluster_and_trains_two_processes(tmp_path, capfd):
    pytest.importorskip("distributed")
    files = str(Path(json.__file__).parent / "*.py")
    arguments = [
        str(tmp_path),
        "--files",
        files,
        "--shards",
        "2",
        "--chunk-len",
        "16",
        "--vocab",
        "400",
        "--k",
        "3",
        "--cluster",
        "2",
    ]
    command.main(arguments)
    output = capfd.readouterr().out
    assert output.index("core-hours") < output.index("tokens ...")  # the plan comes first
    assert "2 processes, 20 steps" in output and "of the time waiting for data" in output and "recall None" in output
    assert json.loads((tmp_path / "report.json").read_text())["cluster"] == 2
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in output.splitlines() if line.startswith("step ")]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.3
    store, database, neighbours = opened(tmp_path)
    assert len(store.shards) == 2 and neighbours.shape == (len(store), 3) and database.recall is None
    ids = np.asarray(neighbours)
    assert (database.document_of(ids)[ids >= 0] != np.repeat(store.chunk_doc[:], 3).reshape(ids.shape)[ids >= 0]).all()
    assert json.loads((tmp_path / "checkpoint" / "state.json").read_text())["step"] == 20


def test_a_plan_counts_what_a_build_writes(tmp_path, monkeypatch):
    recipe = Recipe(
        chunk_len=16, vocab_size=Synthetic.vocab_size, dim=16, index="OPQ4,IVF16,PQ4x4", nprobe=4, k=2, text=False
    )
    report = build(tmp_path, recipe, synthetic_sources(1500, 3, 16), Synthetic(), say=lambda text: None)
    assert (report["chunks"], report["shards"], report["documents"]) == (1500, 3, 75) and 0 < report["recall"][2] <= 1
    with monkeypatch.context() as patch:  # run again it counts nothing, and finds the same
        patch.setattr(HashedTfidf, "fit", lambda *_: pytest.fail("it is known"))
        again = build(tmp_path, recipe, synthetic_sources(1500, 3, 16), Synthetic(), say=lambda text: None)
        assert again["recall"] == report["recall"] and again["disk"] == pytest.approx(report["disk"], abs=2000)
    (tmp_path / "report.json").write_text(json.dumps(report))
    stages = {stage.name: stage for stage in plan.plan(recipe, 1500, 3)}
    written = {
        name: sum(p.stat().st_size for p in (tmp_path / folder).rglob(pattern))
        for name, folder, pattern in (
            ("tokens", "store", "*.bin"),
            ("keys", "keys", "keys.npy"),
            ("index", "keys", "*.faiss*"),
            ("neighbours", "neighbours", "*.npy"),
        )
    }
    for name, size in written.items():
        # a small index is mostly its tables
        assert stages[name].disk == pytest.approx(size, rel=0.5 if name == "index" else 0.1), name
    rates = plan.measured_rates(tmp_path / "report.json")
    again = plan.plan(recipe, 1500, 3, rates=rates)
    for stage, ran in zip(again, report["stages"]):
        assert stage.core_seconds == pytest.approx(ran["core_seconds"], abs=1e-6), stage.name
    texts = plan.plan(dataclasses.replace(recipe, text=True), 1500, 3, rates=rates)
    # a run on token ids says nothing of text
    assert texts[0].core_seconds == pytest.approx(1500 * 16 / 64 * plan.RATES["text"])
    more = [b.core_seconds - a.core_seconds for a, b in zip(again, plan.plan(recipe, 1500, 3, rates=rates, cluster=2))]
    assert min(more) >= 3 * plan.DASK_TASK  # a cluster's own work; what a run on one says of the rest is without it
    on_two = json.loads((tmp_path / "report.json").read_text()) | {"cluster": 2}
    for stage, own in zip(on_two["stages"], more):
        stage["core_seconds"] += 100 + own + 100 / 2 * plan.DASK_IDLE
    (tmp_path / "on_two.json").write_text(json.dumps(on_two))
    rates_of_two = plan.measured_rates(tmp_path / "on_two.json")
    for name, amount in plan.units(recipe, 1500, 1500).items():
        assert rates_of_two[name] * amount == pytest.approx(100 + rates[name] * amount, rel=0.05)
    twice = plan.plan(recipe, 3000, 3, rates=rates)
    assert all(b.core_seconds >= a.core_seconds and b.disk >= a.disk for a, b in zip(again, twice))


def test_the_chunks_of_files_are_estimated_by_a_sample(tmp_path):
    files = [tmp_path / f"{i}.txt" for i in range(300)]
    for i, file in enumerate(files):
        file.write_text("one two three four five six seven\n" * (1 + i % 7))
    tokenizer = Tokenizer.train((file.read_text() for file in files), 300)
    whole = sum(-(-len(ids) // 16) for ids in tokenizer.encode_batch([file.read_text() for file in files]))
    assert command.estimated_chunks(files, tokenizer, 16) == pytest.approx(whole, rel=0.15)
    assert command.estimated_chunks(files[:20], tokenizer, 16) == pytest.approx(
        sum(-(-len(ids) // 16) for ids in tokenizer.encode_batch([file.read_text() for file in files[:20]])), rel=0.01
    )


def test_the_plan_is_printed_for_documents_and_machines(capsys, tmp_path):
    command.main(["plan", "--documents", "5e7", "--machines", "32", "--cores", "64", "--shards", "4096"])
    output = capsys.readouterr().out
    assert (
        "1,000,000,000 chunks of 64 tokens in 4096 shards" in output
        and "on 32 machines of 64 cores" in output
        and "GB" in output
    )
    command.main(["plan", "--synthetic", "1e6", "--cluster", "2", "--machines", "4", "--cores", "8"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("1,000,000,000 such chunks on 4 machines of 8 cores: 460.1 GB")
    with pytest.raises(SystemExit, match="give --chunks, --documents or --synthetic"):
        command.main(["plan"])
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"report\.json: expected the report of a build"):
        command.main(["plan", "--chunks", "10", "--rates", str(tmp_path / "report.json")])


def test_synthetic_documents_are_a_function_of_their_shard():
    first, second = ([d for source in synthetic_sources(50, 2, 16) for d in source()] for _ in range(2))
    assert all(a.name == b.name and np.array_equal(a.content, b.content) for a, b in zip(first, second))
    assert sum(len(d.content) for d in first) == 50 * 16 and len({d.name for d in first}) == len(first)
