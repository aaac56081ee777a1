"""Tiles and splits of topk_chunks: pure functions of the sizes and the target."""

from __future__ import annotations

import contextlib
import dataclasses

import torch
import triton
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_K = 128
#: streaming multiprocessors (SXM4 A100, SXM5 H100 and H200, B200 data sheets): what the splits are cut for
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}


@dataclasses.dataclass(frozen=True)
class Scan:
    block_q: int
    block_s: int
    block_d: int
    num_warps: int
    num_stages: int
    slots: int
    splits: int
    split_len: int

    def launch(self) -> dict:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclasses.dataclass(frozen=True)
class Rows:
    block_q: int
    block_n: int
    block_d: int
    num_warps: int

    def launch(self) -> dict:
        return {"num_warps": self.num_warps}


def slots(k: int) -> int:
    return max(4, triton.next_power_of_2(k))


def scan(call, target) -> Scan:
    b, q, d = call.query.shape
    s = call.key.shape[1]
    bq, bs, bd = 16, 64, 64
    blocks = b * triton.cdiv(q, bq)
    tiles = triton.cdiv(s, bs)
    splits = max(1, min(tiles, 8 // blocks))
    split_len = triton.cdiv(tiles, splits) * bs
    splits = triton.cdiv(s, split_len)
    return Scan(bq, bs, bd, 4, 3, slots(call.k), splits, split_len)


def merge(call, chosen, target) -> Rows:
    return Rows(4, 64, 0, 4)


def gather(d: int) -> Rows:
    return Rows(0, 8, min(1024, triton.next_power_of_2(d)), 4)


def precision(dtype: torch.dtype) -> str:
    return "tf32x3" if dtype == torch.float32 else "ieee"


def target_of(tensor: Tensor):
    return None


def device_of(tensor: Tensor):
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
