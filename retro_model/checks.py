"""Checks of arguments that the models share; every message names the argument, what was expected and what came."""

from __future__ import annotations

from retro_kernels._validate import HEAD_DIM_MAX, HEAD_DIM_MIN, HEAD_DIM_STEP


def check_head_dim(name: str, value: int) -> None:
    """ValueError, naming `name`, unless the kernels take heads of this width."""
    if value % HEAD_DIM_STEP or not HEAD_DIM_MIN <= value <= HEAD_DIM_MAX:
        raise ValueError(f"{name}: expected a multiple of {HEAD_DIM_STEP} from {HEAD_DIM_MIN} to {HEAD_DIM_MAX}; got {value}")
