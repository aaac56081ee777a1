"""The CI template: YAML that GitHub would read, whose commands this tree accepts."""

import re
import shlex

import pytest

from bench import environment
from bench.__main__ import parser

TEMPLATE = environment.ROOT / "bench" / "ci" / "pull_request.yml"


def workflow():
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(TEMPLATE.read_text())


def commands() -> list[str]:
    """Every `python -m bench ...` of every step, its shell operators cut off."""
    scripts = [step.get("run", "") for job in workflow()["jobs"].values() for step in job["steps"]]
    return [found.strip() for script in scripts for found in re.findall(r"python -m bench ([^|;&\n]+)", script)]


def test_every_command_is_accepted():
    found = commands()
    assert {command.split()[0] for command in found} >= {"check", "ab"}
    for command in found:
        arguments = parser().parse_args(shlex.split(command))
        assert callable(arguments.execute), command


def test_a_command_that_does_not_exist_would_be_noticed():
    with pytest.raises(SystemExit):
        parser().parse_args(shlex.split("ab --bass REF"))


def test_steps_and_make_targets_exist():
    makefile = (environment.ROOT / "Makefile").read_text()
    steps = [step for job in workflow()["jobs"].values() for step in job["steps"]]
    assert all("uses" in step or "run" in step for step in steps)
    for step in steps:
        for target in re.findall(r"\bmake (\w+)", step.get("run", "")):
            assert re.search(rf"^{target}:", makefile, re.M), target
        if "uses" in step:
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
