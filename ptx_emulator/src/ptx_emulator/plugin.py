"""A plug-in of pytest: `pytest --emulate 90 their/tests` runs a repository's GPU tests on the emulator.

The device "cuda" is the CPU (`cuda_is_cpu` says how); every Triton kernel is compiled for the architecture and executed
with all checks. An access out of bounds, a race, uninitialised shared memory or a missing wait fails the test that
launched the kernel, with the line of source. A test that needs what is not emulated is skipped, and the summary says
why. A run in which no launch was executed fails.
"""

from __future__ import annotations

import collections
import contextlib
import os

import pytest

from .machines import DEVICES


def pytest_addoption(parser) -> None:
    group = parser.getgroup("emulate", "Triton kernels without a GPU")
    text = "execute Triton kernels as compiled for sm_ARCH, on CPU tensors"
    group.addoption("--emulate", type=int, choices=DEVICES, metavar="ARCH", help=text)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config) -> None:
    arch = early_config.known_args_namespace.emulate
    if arch is not None:
        early_config.pluginmanager.register(Emulation(arch), "ptx-emulation")


class Emulation:
    """One run of pytest on the emulator. It begins before any conftest: modules ask for a GPU at import."""

    def __init__(self, arch: int):
        from . import context

        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # torch.compile: the function itself
        self.arch = arch
        #: of ("executed", kernel), ("skipped", kernel) and ("refused", reason)
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.stack = contextlib.ExitStack()
        self.log = self.stack.enter_context(context.gpu(arch, cuda=True))

    def counted(self, kind: str) -> collections.Counter[str]:
        return collections.Counter({name: count for (of, name), count in self.counts.items() if of == kind})

    def pytest_unconfigure(self) -> None:
        self.stack.close()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        outcome = yield
        report, reason = outcome.get_result(), call.excinfo and _refusal(call.excinfo.value)
        if reason is not None:
            self.counts["refused", reason] += 1
            report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1], f"not emulated: {reason}")
        if report.when == "teardown":
            finished = [launch for launch in self.log.launches if launch.finished]
            self.counts.update(("executed" if all(launch.grid) else "skipped", launch.name) for launch in finished)
            self.log.launches.clear()  # and the tensors with them

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session) -> None:
        passed = session.exitstatus == pytest.ExitCode.OK and not session.config.option.collectonly
        if hasattr(session.config, "workeroutput"):  # a worker of xdist
            session.config.workeroutput["ptx_emulation"] = dict(self.counts)
        elif passed and not self.counted("executed"):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        self.counts.update(getattr(node, "workeroutput", {}).get("ptx_emulation", {}))

    def pytest_terminal_summary(self, terminalreporter) -> None:
        executed, refused = self.counted("executed"), self.counted("refused")
        terminalreporter.write_sep("-", f"emulated on sm_{self.arch}")
        terminalreporter.write_line(
            f"{executed.total()} launches of {len(executed)} kernels executed, {refused.total()} refused, "
            f"{self.counted('skipped').total()} skipped (empty grid)"
        )
        if not executed:
            terminalreporter.write_line("FAILED: no launch was executed", red=True)
        for reason, count in refused.most_common():
            terminalreporter.write_line(f"{count} not run: {reason}")


def _refusal(error: BaseException | None) -> str | None:
    """Why a test could not run here, if that is what ended it: a later failure of another kind stays a failure."""
    from .parse import PtxError

    while error is not None:
        if isinstance(error, PtxError):
            return str(error).splitlines()[0]
        error = error.__cause__
    return None
