"""Whether ptx_emulator can serve the commands that compile or execute GPU kernels without a GPU."""

import importlib.util
import os

from . import exits

INSTALL = "needs ptx-emulator: pip install ./ptx_emulator in a checkout of retro-kernels"


def missing() -> str | None:
    """Return what to install; None if ptx_emulator is there."""
    found = importlib.util.find_spec("ptx_emulator")
    # a folder of that name without the package, as in a checkout, is found as a namespace
    return None if found is not None and found.origin is not None else INSTALL


def required() -> None:
    """Raise UsageError if ptx_emulator is missing, or if Triton interprets kernels in this process."""
    if why := missing():
        raise exits.UsageError(why)
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise exits.UsageError("TRITON_INTERPRET=1 is set: kernels are interpreted in this process, not compiled")
