"""Workflows and templates: valid YAML, commands that this tree accepts, and write permissions."""

import re
import shlex
import subprocess
import sys

import pytest

from retro_bench.__main__ import parser
from retro_bench.records import environment
from retro_bench.report import markdown
from tests.trees import GIT

FOLDERS = environment.ROOT / "bench" / "ci", environment.ROOT / ".github" / "workflows"
FILES = {path.name: path for folder in FOLDERS for path in sorted(folder.glob("*.yml"))}
NAMES = list(FILES)


def read(path):
    return pytest.importorskip("yaml").safe_load(path.read_text())


def workflow(name="pull_request.yml"):
    return read(FILES[name])


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
    action = read(environment.ROOT / "action.yml")
    text = "\n".join(step["run"] for step in action["runs"]["steps"])
    found = re.findall(r"^ *retro-bench ([^|\n]+)", text, re.M)
    assert [command.split()[0] for command in found] == ["check", "ab"]
    for command in found:
        plain = re.sub(r"\$\{BUILD[^}]*\}\s?|\"\$\{more\[@\]\}\"", "", command)
        assert callable(parser().parse_args(shlex.split(plain)).execute), plain
    used = {name for step in action["runs"]["steps"] for name in re.findall(r"inputs\.([\w-]+)", str(step))}
    assert used == set(action["inputs"])


def act(folder, step, bench="exit 0", **inputs):
    """Run a step of the action in a repository, with a stand-in for `retro-bench` that writes down its words."""
    steps = read(environment.ROOT / "action.yml")["runs"]["steps"]
    (script,) = [one["run"] for one in steps if one["name"] == step]
    (folder / "retro-bench").write_text(f'#!/bin/bash\nprintf "<%s>" "$@" >> {folder}/words\n{bench}\n')
    (folder / "retro-bench").chmod(0o755)
    (folder / "python").unlink(missing_ok=True)
    (folder / "python").symlink_to(sys.executable)
    environ = {"PLUGIN": "plug", "BUILD": "", "BASE": "main", "ARGUMENTS": "", "ALLOW": "false"} | inputs
    environ |= {"PATH": f"{folder}:/usr/bin:/bin", "GITHUB_STEP_SUMMARY": str(folder / "summary")}
    command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", script]  # as GitHub runs `shell: bash`
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    words = folder / "words"
    return done.returncode, done.stdout, words.read_text() if words.exists() else ""


@pytest.mark.parametrize(
    ("code", "allow", "expected", "said"),
    [
        *((0, "false", 0, ""), (1, "false", 1, ""), (2, "true", 2, ""), (3, "false", 0, "::warning::")),
        *((5, "true", 5, ""), (6, "false", 6, "::error::"), (6, "true", 0, "::warning::")),
    ],
)
def test_the_action_is_green_only_after_a_comparison_or_with_permission(tmp_path, code, allow, expected, said):
    got, out, _ = act(tmp_path, "slower?", f"exit {code}", ALLOW=allow)
    assert got == expected and said in out and ("::" in out) == bool(said)


def test_the_action_stops_at_the_first_line_of_a_build_that_fails(tmp_path):
    for build in ("false\ntrue", "false | true", "true\nno-such-program\ntrue"):
        assert act(tmp_path, "right?", BUILD=build)[0] not in (0, None)
    assert act(tmp_path, "right?", BUILD="true\ntouch built")[0] == 0 and (tmp_path / "built").exists()


def test_the_action_keeps_every_argument(tmp_path):
    _, _, words = act(tmp_path, "slower?", ARGUMENTS="--case 'a b'\n--quiet\n", BUILD="make a\nmake b")
    assert "<--build><make a\nmake b>" in words and words.endswith("<--case><a b><--quiet>")
    (tmp_path / "words").unlink()
    assert act(tmp_path, "slower?")[2].endswith("<ab.md>")  # no empty word
    code, _, words = act(tmp_path, "slower?", ARGUMENTS="--case 'a")
    assert code != 0 and words.count("<ab>") == 1, "an open quote is an error"


def test_a_pull_request_is_compared_with_the_first_parent_of_its_merge(tmp_path):
    """The checkout holds a merge with a base that may be newer than the event's."""
    starter = (environment.ROOT / "bench/retro_bench/starter/kernels.yml").read_text()
    texts = [starter, *(path.read_text() for path in FILES.values())]
    assert "base: HEAD^1" in starter and not any("base.sha" in text for text in texts)
    git = [*GIT, "-C", str(tmp_path)]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    given = {"BASE": "HEAD^1", "GITHUB_EVENT_NAME": "pull_request"}
    code, out, words = act(tmp_path, "slower?", **given)
    assert code == 4 and "::error::" in out and not words
    for command in (["checkout", "-qb", "b"], ["commit", "-q", "--allow-empty", "-m", "two"], ["checkout", "-q", "-"]):
        subprocess.run([*git, *command], check=True)
    subprocess.run([*git, "merge", "-q", "--no-ff", "-m", "three", "b"], check=True)
    assert act(tmp_path, "slower?", **given)[0] == 0


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
    assert measures["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in measures["jobs"].values())
    assert {"static", "ab", "gpu"} <= measures["jobs"].keys()
    assert comments["permissions"]["pull-requests"] == "write"
    assert comments[True]["workflow_run"]["workflows"] == [measures["name"]]
    for step in steps("comment.yml"):
        assert "checkout" not in step.get("uses", "") and "python" not in step.get("run", "")
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
    requests = {"own": ("7", "abc"), "moved": ("7", "def"), "foreign": ("8", "abc"), "none": ("", "abc")}
    for name, given in (requests | {"many": ("7; echo 7", "abc")}).items():
        (tmp_path / name).mkdir()
        code, asked = post(tmp_path / name, *given)
        assert (("--method" in asked), code == 0) == (name == "own", name in ("own", "moved")), (name, code, asked)
