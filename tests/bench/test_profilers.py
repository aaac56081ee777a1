"""`profile` under external profilers: command lines that parse, calls in ranges."""

import shlex

import pytest
import torch

import retro_bench.__main__ as command_line
from retro_bench.measure import ceilings, profilers, runner
from retro_bench.measure import choose as plan
from retro_bench.records import environment
from retro_bench.report import summary

from .test_run import PROFILE, QUICK


def test_every_recipe_runs_a_command_of_ours():
    page = (environment.ROOT / "docs" / "profiling.md").read_text().replace("\\\n", "")
    lines = [line for line in page.splitlines() if line.startswith(("ncu", "nsys")) and " retro-bench " in line]
    assert [line.split()[0] for line in lines] == ["ncu", "nsys"]
    for line in lines:
        words = shlex.split(line)
        parsed = command_line.parser("profile").parse_args(words[words.index("retro-bench") + 1 :])
        assert parsed.mode == ("fwd",) and parsed.calls >= 1


def test_each_kernel_is_called_inside_its_range_and_the_profilers_window(tiny, monkeypatch):
    """With the driver's calls replaced: warm-ups are outside, the calls inside."""
    seen = []
    monkeypatch.setattr(runner, "step", lambda *_: lambda: seen.append("call"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))
    real = list(
        profilers.kernels(
            plan.Selection("cpu", ("relative_attention",), ("reference",), ("tiny",), ("float32",), ("fwd",))
        )
    )
    monkeypatch.setattr(profilers, "kernels", lambda selection: [(*real[0][:2], _OnCpu(real[0][2]), *real[0][3:])])
    assert profilers.calls(plan.Selection("cuda"), 3, 0, quiet=True) == 1
    name = "relative_attention/reference/tiny/float32/fwd"
    assert seen == ["call"] * profilers.WARMUPS + ["start", name, *["call"] * 3, "pop", "stop"]


class _OnCpu:
    """A case whose tensors are made on the CPU for every device."""

    def __init__(self, case):
        self.case = case

    def make(self, seed, device, dtype):
        return self.case.make(seed, "cpu", dtype)


def test_calls_on_this_machine(tiny, capsys):
    quiet = [word for word in QUICK if word != "--quiet"]
    assert command_line.main(["profile", *quiet, "--backend", "reference", "--mode", "fwd", "--calls", "2"]) == 0
    assert capsys.readouterr().out.split() == ["relative_attention/reference/tiny/float32/fwd"]


@pytest.mark.parametrize(("rehearsal", "code"), [(None, 3), ("1", 0)])
def test_a_rehearsal_is_not_judged_by_its_ceilings(tiny, monkeypatch, capsys, rehearsal, code):
    """Ceilings that are measured next to other work are too low."""
    monkeypatch.setattr(ceilings, "measure", lambda device: None)
    monkeypatch.setattr(summary, "beyond", lambda records: "a share above 100%")
    monkeypatch.delenv(environment.REHEARSAL, raising=False)
    if rehearsal:
        monkeypatch.setenv(environment.REHEARSAL, rehearsal)
    assert command_line.main(PROFILE) == code and "above 100%" in capsys.readouterr().err
