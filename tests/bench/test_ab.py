"""`ab`: two trees in separate processes, plug-ins, refs, exit codes."""

import copy
import json
from pathlib import Path

import pytest
import torch

import retro_bench
from retro_bench.compare import ab, ab_static
from retro_bench.records import environment, record
from retro_bench.static import regressions
from tests.bench.helpers import static_record
from tests.conftest import INTERPRETER


def test_a_failed_build_is_said_with_the_first_error(tmp_path):
    """make prints -Werror on stdout before the compiler prints its error."""
    command = "echo 'gcc -Werror -c bad.c'; echo 'bad.c:1:1: error: expected ;' >&2; false"
    with pytest.raises(RuntimeError, match=r"--build failed in .*: bad\.c:1:1: error: expected ;"):
        ab.build(tmp_path, command)


PLUGIN = """
import os

import retro_bench


def dies(**arguments):
    os._exit(9)


retro_bench.register(retro_bench.Case("leaky_average", "own", {"B": 1, "N": 8, "H": 2, "D": 16}, "a test"))
retro_bench.register(retro_bench.Contender("leaky_average", "dies", dies, role="ours"))
"""


@pytest.mark.nightly
def test_ab_measures_what_a_plugin_registers_and_survives_what_kills_its_process(monkeypatch, tmp_path):
    """A kernel that kills its process fails alone; kernels after it are measured, and the run is not green. What no
    process can run here, or lacks its plug-in, has a reason.
    """
    monkeypatch.setattr(ab, "ABBA_PAIRS", 2)
    (tmp_path / "own_cases.py").write_text(PLUGIN)
    plugins = (("own_cases", str(tmp_path)),)
    absent = ab.Item("leaky_average", "reference", "own", "float32", "fwd")
    deadly = ab.Item("leaky_average", "dies", "own", "float32", "fwd", plugins)
    good = ab.Item("leaky_average", "reference", "own", "float32", "fwd", plugins)
    elsewhere = ab.Item("topk_chunks", "cuda", "rpt-retriever", "float32", "fwd")
    trees, said = (environment.ROOT, environment.ROOT), []
    items = [absent, elsewhere, deadly, good]
    results = dict(ab.batch(*trees, items, 1, True, said.append, worker_pairs=1))
    assert results[elsewhere].status == "unsupported" and said[0] == "worker pair 1 of 1"
    assert results[absent].status == "error" and "--plugin" in results[absent].reason
    assert results[deadly] == ab.Refusal("head", "error", "the worker died with code 9")
    ((base, head),) = results[good]
    assert len(base) == len(head) == 4 and min(base + head) > 0


def test_ab_tells_its_workers_of_plugins(monkeypatch, tmp_path, tables):
    (tmp_path / "more_cases.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "retro_kernels").mkdir()
    asked = []
    monkeypatch.setattr(ab, "compare", lambda base, head, items, *rest: asked.extend(items) or [])
    command = ["ab", "--plugin", "more_cases", "--base", str(tmp_path), "--no-static", "--no-build"]
    command += ["--op", "leaky_average"]
    assert retro_bench.main([*command, "--case", "own", "--dtype", "float32", "--mode", "fwd"]) == 5
    plugins = (("more_cases", str(tmp_path.resolve())),)
    names = ("cpu", "dies")  # every contender with the role of a kernel
    assert asked == [ab.Item("leaky_average", name, "own", "float32", "fwd", plugins) for name in names]


@pytest.mark.parametrize(
    "ref", ["no-such-ref-at-all", "", "--output={folder}/victim", "-h", "HEAD:README.md", "HEAD HEAD"]
)
def test_ab_needs_a_ref_that_exists(ref, capsys, tmp_path):
    """`ab` refuses to compare with nothing, and git gets no user's string as an option."""
    if environment.git_state()["sha"] is None:
        pytest.skip("no git repository here")
    (tmp_path / "victim").write_text("untouched")
    ref = ref.format(folder=tmp_path)
    for more in (["--static-only"], ["--from-diff", "--no-static", "--no-build"]):
        assert retro_bench.main(["ab", f"--base={ref}", *more]) == 4
        assert f"--base {ref!r}" in capsys.readouterr().err
    assert (tmp_path / "victim").read_text() == "untouched"


def test_each_tree_compiles_its_changed_launches_and_the_base_none_that_vanished(monkeypatch, tmp_path):
    rows = {name: static_record(name) for name in ("same", "changed", "gone", "new")}
    ids = {name: row["id"] for name, row in rows.items()}
    sources = {"base": {"same": "1", "changed": "1", "gone": "1"}, "head": {"same": "1", "changed": "2", "new": "1"}}
    compiled, length = {}, {"base": 2, "head": 2}

    def static(root, plugins, arches, parts, folder, side, tree, more):
        path = Path(more[-1])
        if "--fingerprints" in more:
            path.write_text(json.dumps({ids[name]: source for name, source in sources[side].items()}))
            return True
        wanted = json.loads(Path(more[more.index("--only") + 1]).read_text())
        compiled[side] = {name for name in rows if ids[name] in wanted}
        made = copy.deepcopy(rows)  # both sides run at once
        for row in made.values():
            row["case"]["shape"] = record.described({"x": torch.zeros(length[side]), side: 1})
        path.write_text("".join(f"{json.dumps(made[name])}\n" for name in compiled[side]))
        return True

    monkeypatch.setattr(ab_static, "static", static)
    changes = ab_static.compare(tmp_path, tmp_path, "90", [], lambda text: None)
    assert compiled == {"base": {"changed"}, "head": {"changed", "new"}}
    assert changes == ab_static.Comparison(3, 3, [f"{ids['gone']}: no longer compiled"])
    length["head"] = 3
    changes = ab_static.compare(tmp_path, tmp_path, "90", [], lambda text: None)
    other = f"{ids['changed']}: another case, not compared: x: float32 [3], was float32 [2]"
    assert changes == ab_static.Comparison(3, 3, [f"{ids['gone']}: no longer compiled"], other, failed=True)


def test_static_metrics_of_one_name_and_another_case_are_not_compared():
    old, new = (static_record(stack_bytes=n, values={"x": torch.zeros(n + 1)}) for n in (0, 8))
    unknown = static_record()  # a tree that does not tell the arguments is compared by name
    assert regressions.regressions([old], [new]) == []
    (change,) = regressions.changed([old], [new])
    assert change.endswith("another case, not compared: x: float32 [9], was float32 [1]")
    assert "spills" in regressions.regressions([unknown], [new])[0] and regressions.changed([unknown], [new]) == []


@pytest.mark.skipif(INTERPRETER, reason="a process under TRITON_INTERPRET can't compile")
def test_static_records_tell_the_arguments_of_the_call():
    from retro_bench.static import triton_kernels

    launches = triton_kernels.launches([90], ("leaky_average/triton/leaky_scan:wide",))
    (found,) = {record.described(one.values)["x"] for one in launches if one.wanted and one.dtype == "float16"}
    assert found == "float16 [16, 2048, 16, 64]"


def test_ab_prints_and_writes_its_static_half(monkeypatch, tmp_path, capsys):
    asked = []

    def compare(base, head, arches, parts, say, plugins):
        asked.append((base, arches, parts))
        return ab_static.Comparison(36, 2, ["a/triton/b: spills: 8 stack bytes, were 0"])

    monkeypatch.setattr(ab_static, "compare", compare)
    (tmp_path / "retro_kernels").mkdir()
    path = tmp_path / "ab.md"
    command = ["ab", "--base", str(tmp_path), "--static-only", "--arch", "80,90"]
    command += ["--op", "leaky_average", "--markdown", str(path)]
    assert retro_bench.main(command) == 1
    assert asked == [(tmp_path, "80,90", ["leaky_average/"])]
    out = capsys.readouterr().out
    assert (
        "1 regressions; 2 of 36 launches" in out and "spills: 8" in out and "- `a/triton/b: spills" in path.read_text()
    )
    monkeypatch.setattr(ab_static, "compare", lambda *_: None)
    assert retro_bench.main(command[:4]) == 5
