"""A GPU's clock is given back whatever happens, with a stand-in for nvidia-smi."""

import os
import signal
import subprocess
import sys
import time

import pytest

import bench
from bench.measure import clocks
from bench.records import environment

HOLDS = "from bench.measure import clocks; import time\nwith clocks.locked(): print('held', flush=True); time.sleep(60)"


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A stand-in on PATH that writes down what it is asked; returns that file."""
    (tmp_path / "nvidia-smi").write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\ncase "$*" in *max.graphics*) echo 2000;; esac\n'
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "asked"


def test_the_clock_is_held_and_given_back(smi):
    with clocks.locked() as held:
        assert held == 1600 and "--reset" not in smi.read_text()
    query, lock, reset = smi.read_text().splitlines()
    assert "max.graphics" in query and lock == "-i 0 --lock-gpu-clocks=1600,1600" and reset == "-i 0 --reset-gpu-clocks"


def test_an_exception_gives_it_back(smi):
    with pytest.raises(KeyError), clocks.locked(1000):
        raise KeyError
    assert smi.read_text().endswith("--reset-gpu-clocks\n")


def test_a_kill_gives_it_back(smi):
    process = subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, cwd=environment.ROOT)
    assert process.stdout.readline() == b"held\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 60
    while "--reset" not in smi.read_text() and time.monotonic() < end:
        time.sleep(0.05)
    assert smi.read_text().endswith("--reset-gpu-clocks\n")


def test_a_refusal_is_said_and_a_cpu_has_no_such_clock(smi, capsys):
    (smi.parent / "nvidia-smi").write_text("#!/bin/sh\necho Insufficient Permissions >&2\nexit 4\n")
    with pytest.raises(clocks.Refused, match="Insufficient Permissions"), clocks.locked(1000):
        pass
    assert bench.main(["run", "--device", "cpu", "--lock-clocks"]) == 4
    assert "holds a GPU's clock" in capsys.readouterr().err
