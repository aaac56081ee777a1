"""The CI templates: YAML that GitHub would read, whose commands this tree accepts, and who may write what."""

import re
import shlex

import pytest

from bench import environment
from bench.__main__ import parser
from bench.report import markdown

FOLDER = environment.ROOT / "bench" / "ci"
NAMES = sorted(path.name for path in FOLDER.glob("*.yml"))


def workflow(name="pull_request.yml"):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((FOLDER / name).read_text())


def steps(name="pull_request.yml") -> list[dict]:
    return [step for job in workflow(name)["jobs"].values() for step in job["steps"]]


def commands() -> list[str]:
    """Every `python -m bench ...` of every step, its shell operators cut off."""
    return [found.strip() for step in steps() for found in re.findall(r"python -m bench ([^|;&>\n]+)", step.get("run", ""))]


def test_every_command_is_accepted():
    found = commands()
    assert {command.split()[0] for command in found} >= {"check", "ab", "run", "report"}
    for command in found:
        arguments = parser().parse_args(shlex.split(command))
        assert callable(arguments.execute), command


def test_a_command_that_does_not_exist_would_be_noticed():
    with pytest.raises(SystemExit):
        parser().parse_args(shlex.split("ab --bass REF"))


@pytest.mark.parametrize("name", NAMES)
def test_steps_and_make_targets_exist(name):
    makefile = (environment.ROOT / "Makefile").read_text()
    assert all("uses" in step or "run" in step for step in steps(name))
    for step in steps(name):
        for target in re.findall(r"\bmake (\w+)", step.get("run", "")):
            assert re.search(rf"^{target}:", makefile, re.M), target
        if "uses" in step:
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])


def test_what_runs_a_pull_requests_code_may_write_nothing_and_what_writes_runs_none_of_it():
    measures, comments = workflow(), workflow("comment.yml")
    assert measures["permissions"] == {"contents": "read"} and not any("permissions" in job for job in measures["jobs"].values())
    assert {"static", "ab", "gpu"} <= measures["jobs"].keys()
    assert comments["permissions"]["pull-requests"] == "write" and comments[True]["workflow_run"]["workflows"] == [measures["name"]]
    assert not [step for step in steps("comment.yml") if "checkout" in step.get("uses", "") or "python" in step.get("run", "")]
    uploaded = next(s for s in steps() if "upload-artifact" in s.get("uses", "") and s["with"]["name"] == "comment")
    downloaded = next(s for s in steps("comment.yml") if "download-artifact" in s.get("uses", ""))
    assert uploaded["with"]["name"] == downloaded["with"]["name"]


def test_the_comment_is_found_by_what_it_begins_with():
    assert any(f'startswith("{markdown.MARKER}")' in step.get("run", "") for step in steps("comment.yml"))
