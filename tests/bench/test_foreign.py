"""`ab` in another repository: four faults are red, an empty change is green, each side imports its own code."""

import shutil

import pytest

from tests.bench import foreign
from tests.conftest import INTERPRETER

pytestmark = [
    pytest.mark.skipif(INTERPRETER, reason="a process under TRITON_INTERPRET can't compile"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return foreign.repository(tmp_path_factory.mktemp("foreign") / "repository")


@pytest.fixture
def repository(made):
    yield made
    foreign.restore(made)


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["lost coalescing", "spill"])
def test_worse_machine_code_is_red(repository, fault):
    pytest.importorskip("triton")
    foreign.plant(repository, fault)
    done = foreign.gate(repository, "--static-only")
    _, _, _, code, words = foreign.FAULTS[fault]
    assert done.returncode == code and words in done.stdout, done.stdout + done.stderr


@pytest.mark.nightly
def test_the_same_machine_code_is_green(repository):
    pytest.importorskip("triton")
    (repository / "kernels.py").write_text(foreign.KERNELS + "\n# a remark\n")
    done = foreign.gate(repository, "--static-only")
    assert done.returncode == 0 and "0 of 1 launches differ" in done.stdout, done.stdout + done.stderr


def test_a_build_that_fails_and_a_folder_that_is_no_repository_are_said(repository, tmp_path):
    (repository / "decay.cpp").write_text("no C++")
    done = foreign.gate(repository, "--no-static")
    assert done.returncode == 4, done.stdout + done.stderr
    assert "--build failed in repository: decay.cpp:1:1: error" in done.stderr
    outside = foreign.bench(tmp_path, "ab", "--base", "HEAD")
    assert outside.returncode == 4 and "in no git repository" in outside.stderr
