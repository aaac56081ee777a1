"""Leaky average in the harness: its cases, its work and its baselines.

`eager` multiplies blocks of a Toeplitz matrix and carries a state; `toeplitz` multiplies the one [N,N] matrix.
"""

from __future__ import annotations

from typing import Any

from ..registry import Contender, Operator, Work
from . import _shared as shared
from ._shared import MOSAICS, inputs, torch

OP = "leaky_average"
BLOCK = 128  # time steps of one product
LONGEST_MATRIX = 2048  # time steps
DECAYS = (0.3, 0.99)

CASES = [
    shared.case(OP, "mosaics", f"{MOSAICS}, key extractor", "B=8 N=512 H=12 D=64"),
    shared.case(OP, "mosaics-b64", f"{MOSAICS}, 64 sequences", "B=64 N=512 H=12 D=64", gpu=4),
    shared.case(OP, "long", "a long document, with a state carried in", "B=1 N=8192 H=12 D=64", extras=("initial",)),
]


def arguments(case, draw) -> dict[str, Any]:
    kwargs = inputs.leaky(
        **{x: case.shape[x] for x in "BNHD"}, decay=DECAYS, initial="initial" in case.extras, draw=draw
    )
    return kwargs | dict(case.options)


def work(case, itemsize: int, mode: str) -> Work:
    elements = shared.product(case, "BNHD")
    forward = Work(2.0 * elements, 2 * elements * itemsize)
    # backward: reads d(y) and y, writes d(x); the recurrence, and one product a step for the gradient of the decay
    return forward if mode != "fwdbwd" else forward + Work(4.0 * elements, 3 * elements * itemsize)


def _toeplitz(decay: torch.Tensor, n: int) -> torch.Tensor:
    """Return [H,n,n]: decay**(t-s) for s <= t, else 0."""
    steps = torch.arange(n, device=decay.device)
    power = steps[:, None] - steps
    return decay[:, None, None].pow(power.clamp_min(0).to(decay.dtype)).tril()


def eager(x, decay, *, initial=None) -> torch.Tensor:
    """Multiply blocks of 128 steps by a triangular matrix, and carry the last state to the next block."""
    n = x.shape[1]
    matrix = _toeplitz(decay, min(n, BLOCK))
    steps = torch.arange(1, matrix.shape[1] + 1, device=x.device, dtype=decay.dtype)
    fading = decay[None, :].pow(steps[:, None])[..., None]  # [n,H,1]
    state, blocks = initial, []
    for block in x.split(BLOCK, 1):
        length = block.shape[1]
        y = torch.einsum("hts,bshd->bthd", matrix[:, :length, :length], block)
        if state is not None:
            y = y + fading[:length] * state[:, None]
        state = y[:, -1]
        blocks.append(y)
    return torch.cat(blocks, 1)


def toeplitz(x, decay, *, initial=None) -> torch.Tensor:
    """Multiply by the whole [N,N] matrix of each head."""
    y = torch.einsum("hts,bshd->bthd", _toeplitz(decay, x.shape[1]), x)
    if initial is not None:
        steps = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=decay.dtype)
        y = y + decay[None, :].pow(steps[:, None])[..., None] * initial[:, None]
    return y


def _long_matrix(case, dtype, device) -> str | None:
    n = case.shape["N"]
    return f"the [N,N] matrix is for N up to {LONGEST_MATRIX}; got {n}" if n > LONGEST_MATRIX else None


def _matrix_bytes(case, itemsize: int, backward: bool) -> float:
    return case.shape["H"] * case.shape["N"] ** 2 * itemsize * (6 if backward else 3)


OPERATOR = Operator(OP, ("y",), ("x", "decay", "initial"), arguments, shared.outputs(OP), work)
BASELINES = (
    Contender(OP, "eager", eager),
    shared.compiled(OP, eager),
    Contender(OP, "toeplitz", toeplitz, reason=_long_matrix, peak_bytes=_matrix_bytes),
)
