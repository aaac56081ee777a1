"""Workflows and templates: valid YAML, commands that this tree accepts, and write permissions."""

import re
import shlex
import subprocess

import pytest

from retro_bench.__main__ import parser
from retro_bench.records import environment
from retro_bench.report import markdown

FOLDERS = environment.ROOT / "bench" / "ci", environment.ROOT / ".github" / "workflows"
FILES = {path.name: path for folder in FOLDERS for path in sorted(folder.glob("*.yml"))}
NAMES = list(FILES)


def workflow(name="pull_request.yml"):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(FILES[name].read_text())


def steps(name="pull_request.yml") -> list[dict]:
    return [step for job in workflow(name)["jobs"].values() for step in job["steps"]]


def commands(name="pull_request.yml") -> list[str]:
    """Return every `.venv/bin/retro-bench` command of every step, for each value of its job's matrix."""
    every = []
    for job in workflow(name)["jobs"].values():
        text = "\n".join(step.get("run", "") for step in job["steps"])
        for key, values in job.get("strategy", {}).get("matrix", {}).items():
            text = "\n".join(text.replace(f"${{{{ matrix.{key} }}}}", str(value)) for value in values)
        every += [command.strip() for command in re.findall(r"\.venv/bin/retro-bench ([^|;&>\n]+)", text)]
    return every


def test_every_command_is_accepted():
    assert {command.split()[0] for command in commands()} >= {"check", "ab", "run", "report"}
    assert {command.split()[0] for command in commands("nightly.yml")} == {"emulate"}
    for command in [command for name in NAMES for command in commands(name)]:
        arguments = parser().parse_args(shlex.split(command))
        assert callable(arguments.execute), command


def test_the_actions_commands_are_accepted():
    """ "$VARIABLES" are replaced by a module, a commit and the like."""
    yaml = pytest.importorskip("yaml")
    action = yaml.safe_load((environment.ROOT / "action.yml").read_text())
    text = "\n".join(step["run"] for step in action["runs"]["steps"])
    found = re.findall(r"^ *retro-bench ([^|\n]+)", text, re.M)
    assert [command.split()[0] for command in found] == ["check", "ab"]
    for command in found:
        plain = re.sub(r"\$\{BUILD[^}]*\}\s?|\"\$\{more\[@\]\}\"", "", command)
        assert callable(parser().parse_args(shlex.split(plain)).execute), plain
    used = {name for step in action["runs"]["steps"] for name in re.findall(r"inputs\.([\w-]+)", str(step))}
    assert used == set(action["inputs"])


def test_a_command_that_does_not_exist_would_be_noticed():
    with pytest.raises(SystemExit):
        parser().parse_args(shlex.split("ab --bass REF"))


@pytest.mark.parametrize("name", NAMES)
def test_steps_and_make_targets_exist(name):
    makefile = (environment.ROOT / "Makefile").read_text()
    assert all("uses" in step or "run" in step for step in steps(name))
    for step in steps(name):
        for target in re.findall(r"\bmake (\w[\w-]*)", step.get("run", "")):
            assert re.search(rf"^{target}:", makefile, re.M), target
        if "uses" in step:
            assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"]), "pinned by commit: a tag can be moved"


def test_what_runs_a_pull_requests_code_may_write_nothing_and_what_writes_runs_none_of_it():
    measures, comments = workflow(), workflow("comment.yml")
    assert measures["permissions"] == {"contents": "read"} and not any(
        "permissions" in job for job in measures["jobs"].values()
    )
    assert {"static", "ab", "gpu"} <= measures["jobs"].keys()
    assert comments["permissions"]["pull-requests"] == "write" and comments[True]["workflow_run"]["workflows"] == [
        measures["name"]
    ]
    assert not [
        step for step in steps("comment.yml") if "checkout" in step.get("uses", "") or "python" in step.get("run", "")
    ]
    uploaded = next(s for s in steps() if "upload-artifact" in s.get("uses", "") and s["with"]["name"] == "comment")
    downloaded = next(s for s in steps("comment.yml") if "download-artifact" in s.get("uses", ""))
    assert uploaded["with"]["name"] == downloaded["with"]["name"]


def test_the_comment_is_found_by_what_it_begins_with():
    assert any(f'startswith("{markdown.MARKER}")' in step.get("run", "") for step in steps("comment.yml"))


def post(folder, number, head):
    """Return the exit code of the commenting step and its requests; `gh` is a stand-in with one open pull request, 7,
    at commit abc.
    """
    (folder / "comment").mkdir()
    (folder / "comment" / "number").write_text(number)
    (folder / "comment" / "ab.md").write_text("a table")
    gh = folder / "gh"
    gh.write_text(f"""#!/bin/sh
echo "$*" >> {folder}/asked
case "$2" in repos/me/it/pulls/7) echo abc;; repos/me/it/pulls/*) exit 1;; esac
""")
    gh.chmod(0o755)
    (step,) = [s for s in steps("comment.yml") if "run" in s]
    environ = {"PATH": f"{folder}:/usr/bin:/bin", "REPO": "me/it", "MEASURED": head, "GH_TOKEN": ""}
    done = subprocess.run(["bash", "-e", "-c", step["run"]], cwd=folder, env=environ, capture_output=True, text=True)
    return done.returncode, (folder / "asked").read_text()


def test_a_comment_is_posted_only_to_the_pull_request_that_was_measured(tmp_path):
    for name, number, head in (
        ("own", "7", "abc"),
        ("moved", "7", "def"),
        ("foreign", "8", "abc"),
        ("many", "7; echo 7", "abc"),
        ("none", "", "abc"),
    ):
        (tmp_path / name).mkdir()
        code, asked = post(tmp_path / name, number, head)
        assert ("--method" in asked) == (name == "own") and (code == 0) == (name in ("own", "moved")), (
            name,
            code,
            asked,
        )
