"""What the kernels are compared with: independent formulations of each op, written without looking at its reference.

Each is checked against the float64 reference before it is timed; one that fails is reported and not used. `eager` is
also the accuracy
yardstick: plain PyTorch with every product and softmax in the case's type. The functions are in the file of their op.
"""

from __future__ import annotations

import importlib.util

from ..registry import Contender, Later

CROSS, SELF, LOGITS, TOPK, LEAKY = (
    "chunked_cross_attention",
    "relative_attention",
    "relative_logits",
    "topk_chunks",
    "leaky_average",
)
KEY_BLOCK = 65_536  # keys a product of topk_chunks/blocked: 256 MiB of scores for 1024 queries
LONGEST_MATRIX = 2048  # time steps


def _baseline(op: str, name: str, **more) -> Contender:
    return Contender(op, name, Later(f"{__name__}.{op}:{name}"), **more)


def contenders() -> list[Contender]:
    """Compiled twins only on request: each case costs tens of seconds of compilation, which is hours
    over all of them.
    """
    twin = {"default_on": ()}
    return [
        _baseline(CROSS, "eager", peak_bytes=_cross_bytes),
        _baseline(CROSS, "eager_compiled", peak_bytes=_cross_bytes, **twin),
        _baseline(CROSS, "sdpa_bias", peak_bytes=_cross_bytes),
        _baseline(CROSS, "sdpa_plain", without_positions=True),
        _baseline(CROSS, "flex", devices=("cuda",), reason=_no_mask("neighbour_mask")),
        _baseline(CROSS, "retro_pytorch", reason=_no_retro_pytorch, without_positions=True, peak_bytes=_cross_bytes),
        _baseline(SELF, "eager", peak_bytes=_self_bytes),
        _baseline(SELF, "eager_compiled", peak_bytes=_self_bytes, **twin),
        _baseline(SELF, "sdpa_bias", peak_bytes=_self_bytes),
        _baseline(SELF, "sdpa_plain", without_positions=True),
        _baseline(SELF, "flex", devices=("cuda",), reason=_no_mask("key_mask")),
        _baseline(LOGITS, "eager", peak_bytes=_band_bytes),
        _baseline(LOGITS, "eager_compiled", peak_bytes=_band_bytes, **twin),
        _baseline(TOPK, "eager", peak_bytes=_score_bytes),
        _baseline(TOPK, "blocked", reason=_one_block, differentiable=False),
        _baseline(TOPK, "faiss", devices=("cpu",), reason=_no_faiss, differentiable=False),
        _baseline(LEAKY, "eager"),
        _baseline(LEAKY, "eager_compiled", **twin),
        _baseline(LEAKY, "toeplitz", reason=_long_matrix, peak_bytes=_matrix_bytes),
    ]


def _no_mask(name: str):
    return lambda case, dtype, device: f"this FlexAttention baseline has no {name}" if name in case.extras else None


def _no_retro_pytorch(case, dtype, device) -> str | None:
    if importlib.util.find_spec("retro_pytorch") is None:
        return "retro-pytorch is not installed"
    s = case.shape
    if "neighbour_gate" in case.extras or set(case.options) - {"query_start"} or s["N"] < s["M"]:
        return "retro-pytorch's cross-attention has neither gates nor a scale, and attends nothing in less than a chunk"
    if case.options.get("query_start") or s["L"] != s["N"] // s["M"] or s.get("G", s["H"]) != s["H"]:
        return "retro-pytorch's cross-attention takes whole sequences and a key head for each query head"
    return None


def _no_faiss(case, dtype, device) -> str | None:
    if importlib.util.find_spec("faiss") is None:
        return "faiss is not installed"
    if dtype != "float32":
        return "FAISS's exact index takes float32"
    if case.shape["B"] != 1 or case.extras or set(case.options) - {"metric"}:
        return "FAISS has no batch, causal limit or document filter"
    return None


def _one_block(case, dtype, device) -> str | None:
    return "one block holds all keys: the same as eager" if case.shape["S"] <= KEY_BLOCK else None


def _long_matrix(case, dtype, device) -> str | None:
    n = case.shape["N"]
    return f"N={n}: the [N,N] matrix costs more than it tells" if n > LONGEST_MATRIX else None


def _cross_bytes(case, itemsize: int, backward: bool) -> float:
    """Logits, position logits and probabilities of every pair, and as much again for the backward."""
    s = case.shape
    return s["B"] * s["H"] * s["N"] * s["K"] * s["R"] * itemsize * (7 if backward else 4)


def _self_bytes(case, itemsize: int, backward: bool) -> float:
    s = case.shape
    return s["B"] * s["H"] * s["N"] * s["S"] * itemsize * (8 if backward else 5)


def _band_bytes(case, itemsize: int, backward: bool) -> float:
    s = case.shape
    return s["B"] * s["H"] * s["N"] * (s["N"] + 2 * s["S"]) * itemsize * (2 if backward else 1)


def _score_bytes(case, itemsize: int, backward: bool) -> float:
    s = case.shape
    return s["B"] * s["Q"] * s["S"] * itemsize * (3 if case.options or case.extras else 1)


def _matrix_bytes(case, itemsize: int, backward: bool) -> float:
    return case.shape["H"] * case.shape["N"] ** 2 * itemsize * (6 if backward else 3)
