"""The gates against faults planted in a copy of this tree; `tests/bench/proof.py` has more of them."""

import dataclasses

import pytest

from retro_bench.commands import ab as ab_command
from retro_bench.compare import ab_static, affected
from retro_bench.records import environment
from retro_bench.registry import OPERATORS
from tests.bench import plants
from tests.conftest import INTERPRETER

compiles = pytest.mark.skipif(INTERPRETER, reason="a process under TRITON_INTERPRET can't compile")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return plants.copy_tree(tmp_path_factory.mktemp("base"))


def planted(tmp_path, *faults):
    head = plants.copy_tree(tmp_path / "head")
    for fault in faults:
        fault.apply(head)
    return head


@compiles
@pytest.mark.nightly
def test_static_faults_are_told_from_a_harmless_edit(base, tmp_path):
    """One launch of each edited kernel is compiled in both trees; each fault is reported, the new name is not."""
    pytest.importorskip("triton")
    head, launches = planted(tmp_path, *plants.STATIC), [plant.launch for plant in plants.STATIC]
    changes = ab_static.compare(base, head, "90", launches, print)
    assert changes.launches == changes.differ == len(launches)
    for plant in plants.STATIC:
        found = [line for line in changes.worse if plant.launch in line and plant.caught_as in line]
        assert plant is plants.HARMLESS or found, (plant.name, changes.worse)
    assert not any(plants.HARMLESS.launch in line for line in changes.worse)
    assert ab_command.exit_code([], changes) == 1


@compiles
@pytest.mark.nightly
def test_a_comment_is_not_even_compiled(base, tmp_path):
    pytest.importorskip("triton")
    comment = dataclasses.replace(plants.HARMLESS, new=f"            # a remark\n{plants.HARMLESS.old}")
    changes = ab_static.compare(base, planted(tmp_path, comment), "90", [plants.HARMLESS.launch], print)
    assert (changes.launches, changes.differ, changes.worse) == (1, 0, [])
    assert ab_command.exit_code([], changes) == 0


def test_every_plant_still_finds_its_place():
    for plant in (*plants.STATIC, plants.WRONG, plants.slower(5)):
        assert (environment.ROOT / plant.path).read_text().count(plant.old) == 1, plant.name
    with pytest.raises(ValueError, match=r"cpu\.py: expected 'no such text' once; got 0"):
        dataclasses.replace(plants.WRONG, old="no such text").apply(environment.ROOT)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["README.md", "tests/ops/test_leaky_average.py", "bench/retro_bench/compare/ab.py"], ""),
        (["retro_kernels/ops/leaky_average/triton/kernels.py", "csrc/cuda/topk_chunks.cu"], ""),
        (["csrc/cpu/leaky_average.cpp"], "leaky_average"),
        (
            ["retro_kernels/ops/topk_chunks/cpu.py", "retro_kernels/ops/relative_logits/__init__.py"],
            "topk_chunks relative_logits",
        ),
        (["csrc/cpu/partition.h"], "relative_attention relative_logits"),
        (
            ["csrc/cpu/simd.h"],  # every op with a C++ kernel
            "chunked_cross_attention relative_attention relative_logits topk_chunks leaky_average "
            "merge_attention rms_norm cross_entropy",
        ),
        (["retro_kernels/core/dispatch.py"], "all"),
        (["setup.py"], "all"),
        (["tools/build_extensions.py"], "all"),
    ],
)
def test_changed_files_name_the_kernels_they_affect(files, expected):
    kernels = affected.ops(files, OPERATORS, environment.ROOT)
    assert kernels == (set(OPERATORS) if expected == "all" else set(expected.split()))


def test_changed_files_are_gits(tmp_path):
    head = planted(tmp_path, plants.WRONG)
    (head / "csrc" / "cpu" / "new.h").write_text("")
    assert affected.changed_files(head, "HEAD") == [plants.WRONG.path, "csrc/cpu/new.h"]
    with pytest.raises(ValueError, match="no-such-ref"):
        affected.changed_files(head, "no-such-ref")
