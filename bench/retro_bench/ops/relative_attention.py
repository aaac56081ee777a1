"""Relative attention in the harness: its cases, its work and its baselines.

The baselines are the whole [N,S] matrix in PyTorch, SDPA with the position logits as its mask, and FlexAttention.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from ..registry import Case, Operator, Work
from . import _shared as shared
from ._shared import BIASES, DECODE, MOSAICS, RETRO, RPT, TRANSFORMER_XL, inputs, torch

if TYPE_CHECKING:
    from torch import Tensor

OP = "relative_attention"
#: a causal mask, with a table of relative keys from displacement 0
CAUSAL = {"causal": True, "rel_start": 0}
MOSAIC = {"extras": (), "options": {"causal": True, "causal_gap": 1, "scale": 0.125}}
LOW_RANK = {"extras": ("rel_key", "rel_query"), "options": CAUSAL}
USUAL = {"B": 1, "N": 1024, "H": 8, "D": 64}


def _case(name: str, source: str, shape: str, **more) -> Case:
    sizes = USUAL | shared.letters(shape)
    sizes.setdefault("S", sizes["N"])
    return shared.case(OP, name, source, sizes, **{"extras": TRANSFORMER_XL} | more)


def _window(size: int) -> dict[str, Any]:
    return {"extras": (), "options": {"causal": True, "window": size}}


CASES = [
    _case("decoder-1k", f"{RETRO}, decoder self-attention", "T=1024", options=CAUSAL),
    _case("decoder-2k", f"{RETRO}, decoder, 1.5b", "B=4 N=2048 H=16 D=128 T=2048", options=CAUSAL, gpu=24),
    _case("encoder-self", f"{RETRO}, encoder over the 16 neighbours of 8 chunks", "B=16 N=128 H=16"),
    _case("encoder-self-b512", f"{RETRO}, encoder, 8 sequences", "B=512 N=128 H=16", gpu=16),
    _case("encoder-cross", f"{RETRO}, encoder cross-attention to the chunk, 16 neighbours", "B=16 N=128 S=64 H=16"),
    _case("encoder-cross-b512", f"{RETRO}, encoder cross-attention, 8 sequences", "B=512 N=128 S=64 H=16", gpu=12),
    _case("rpt-window-2k", f"{RPT}, section 4, a shorter window", "N=2048 D=128", **_window(512), devices=()),
    _case("rpt-window-16k", f"{RPT}, section 4: sliding window", "N=16384 D=128", **_window(2048), gpu=40),
    _case("mosaics", f"{MOSAICS}, contextual memory", "B=2 N=512 H=12", **MOSAIC),
    _case("mosaics-b32", f"{MOSAICS}, contextual memory, 32 sequences", "B=32 N=512 H=12", **MOSAIC, gpu=12),
    _case("low-rank-1k", "relative logits of width 16, extent 256", "E=16 T=256", **LOW_RANK),
    _case("low-rank-8k", "relative logits of width 16, extent 1024", "N=8192 E=16 T=1024", **LOW_RANK, gpu=32),
    _case("conformer", "arXiv 2005.08100: bidirectional over 60 s of speech", "N=1500", gpu=4),
    _case("conformer-750", "arXiv 2005.08100: bidirectional over 30 s of speech", "N=750", devices=()),
    _case("t5", "arXiv 1910.10683: a scalar bias per displacement", "N=512 E=1", extras=LOW_RANK["extras"]),
    _case("grouped-4k", "grouped-query decoder", "N=4096 H=16 G=4 D=128 T=4096", options=CAUSAL, gpu=24),
    _case(
        "decode",
        f"{RETRO}, decoder, one token against 2047 cached",
        "N=1 S=2048 H=16 T=2048",
        options=CAUSAL,
        modes=DECODE,
    ),
]


def arguments(case, draw) -> dict[str, Any]:
    s, options = case.shape, dict(case.options)
    return inputs.self_attention(
        **{x: s[x] for x in "BNSHD"},
        **shared.position_arguments(case, "bounded", s.get("T", s["N"] + s["S"] - 1), options.pop("rel_start", None)),
        G=s.get("G"),
        key_mask="key_mask" in case.extras,
        share=shared.SHARE,
        draw=draw,
        **options,
    )


def work(case, itemsize: int, mode: str) -> Work:
    s = case.shape
    b, n, keys, h, d = (s[x] for x in "BNSHD")
    g, e = s.get("G", h), s.get("E", d)
    pairs, positioned = _pairs(case)
    query, memory, lse = b * n * h * d * itemsize, b * keys * g * d * itemsize, b * h * n * shared.LSE_BYTES
    content = 4.0 * b * pairs * h * d
    position = 2.0 * b * positioned * h * e if "rel_key" in case.extras else 0.0
    table = (h * s.get("T", n + keys - 1) * e if position else 0) * itemsize
    if "rel_query" in case.extras:
        table += b * n * h * e * itemsize
    return shared.attention_work(mode, content, position, query, memory, table, lse)


def _pairs(case) -> tuple[int, int]:
    """Count the visible (query, key) pairs of one head, and those whose displacement has a row in rel_key."""
    n, keys, options = case.shape["N"], case.shape["S"], case.options
    offset = options.get("query_offset", keys - n if options.get("causal") else 0)
    first_row = options.get("rel_start", offset - (keys - 1))
    rows = case.shape.get("T", n + keys - 1)
    pairs = positioned = 0
    for i in range(offset, offset + n):
        # keys j with low <= displacement i-j < high
        low = max(options.get("causal_gap", 0) if options.get("causal") else i - keys + 1, i - keys + 1)
        high = min(options.get("window") or i + 1, i + 1)
        pairs += max(high - low, 0)
        positioned += max(min(high, first_row + rows) - max(low, first_row), 0)
    return pairs, positioned


def rows(call: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    n, keys = call["query"].shape[1], call["key"].shape[1]
    offset = call.get("query_offset")
    if offset is None:
        offset = keys - n if call.get("causal") else 0
    cut = shared.cut(call, ("query", "rel_query", "query_segment"), first, last) | {"query_offset": offset + first}
    if call.get("rel_key") is not None and call.get("rel_start") is None:
        cut["rel_start"] = offset - (keys - 1)
    return cut


@dataclasses.dataclass
class Arguments(shared.Attention):
    """Arguments of the op that the baselines serve, and the tensors that they materialise from them."""

    causal: bool = False
    causal_gap: int = 0
    window: int | None = None
    query_offset: int | None = None
    key_mask: Tensor | None = None

    @property
    def offset(self) -> int:
        if self.query_offset is not None:
            return self.query_offset
        return self.key.shape[1] - self.query.shape[1] if self.causal else 0

    @property
    def first_row(self) -> int:
        """Displacement of the table's first row."""
        return self.offset - (self.key.shape[1] - 1) if self.rel_start is None else self.rel_start

    @property
    def triangle(self) -> bool:
        """Whether the call is plain causal attention over a square, which SDPA needs no mask for."""
        masked = self.causal_gap != 0 or self.window is not None or self.key_mask is not None
        square = self.query.shape[1] == self.key.shape[1] and self.offset == 0
        return self.rel_key is None and self.causal and square and not masked

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value with as many heads, the content bias added."""
        return self.content, *(shared.repeat_groups(t, self.query.shape[2]) for t in (self.key, self.value))

    def visible(self) -> Tensor | None:
        """Return the visible pairs, bool [1 or B,1,N,S]; None if all are."""
        visible = None
        if self.causal or self.window is not None:
            ones = torch.ones(self.query.shape[1], self.key.shape[1], dtype=torch.bool, device=self.query.device)
            visible = ones.tril(self.offset - self.causal_gap) if self.causal else ones
            if self.window is not None:
                visible = visible & ones.triu(self.offset - self.window + 1)
            visible = visible[None, None]
        if self.key_mask is not None:
            visible = self.key_mask[:, None, None] if visible is None else visible & self.key_mask[:, None, None]
        return visible

    def bias(self) -> Tensor | None:
        """Return the position logits [B,H,N,S], by a skew for a full table and by a gather for a bounded one."""
        if self.rel_key is None:
            return None
        n, keys, rows = self.query.shape[1], self.key.shape[1], self.rel_key.shape[1]
        if 4 * rows >= n + keys - 1:
            return shared.position_bias(self.position, self.rel_key, keys, self.offset - (keys - 1), self.rel_start)
        i, j = (torch.arange(size, device=self.query.device) for size in (n, keys))
        column = i[:, None] + (self.offset - self.first_row + 1) - j
        band = self.padded_band()
        return band.gather(-1, column.clamp(0, rows + 1).expand(*band.shape[:2], -1, -1))

    def padded_band(self) -> Tensor:
        """Return the position logits of every row of the table, [B,H,N,T+2]. Both ends are 0, for what lies outside."""
        band = torch.einsum("bnhe,hte->bhnt", self.position, self.rel_key.expand(self.query.shape[2], -1, -1))
        return torch.nn.functional.pad(band, (1, 1))


def eager(query, key, value, **options) -> Tensor:
    """Attend with every logit in memory."""
    call = Arguments(query, key, value, **options)
    query, key, value = call.heads()
    bias = call.bias()
    logits = torch.einsum("bnhd,bshd->bhns", query, key)
    logits = logits if bias is None else logits + bias
    return shared.attend(logits * call.factor, call.visible(), value, "bhns,bshd->bnhd")


def sdpa_bias(query, key, value, **options) -> Tensor:
    """Attend by torch's SDPA, with position logits and mask as its additive mask."""
    call = Arguments(query, key, value, **options)
    sides = [t.transpose(1, 2) for t in call.heads()]
    bias, visible = call.bias(), None if call.triangle else call.visible()
    mask = visible if bias is None else bias * call.factor
    if bias is not None and visible is not None:
        mask = mask.masked_fill(~visible, shared.hidden(query.dtype))
    out = torch.nn.functional.scaled_dot_product_attention(
        *sides, attn_mask=mask, is_causal=call.triangle, scale=call.factor
    ).transpose(1, 2)
    if visible is not None:
        out = out.masked_fill(~visible.any(-1).transpose(1, 2)[..., None], 0)  # rows without a visible key
    return out


def flex(query, key, value, **options) -> Tensor:
    """Attend by FlexAttention with a block mask. It captures the position logits before the skew."""
    call = Arguments(query, key, value, **options)
    score = None
    if call.rel_key is not None:
        band, rows = call.padded_band() * call.factor, call.rel_key.shape[1]
        shift = call.offset - call.first_row + 1

        def score(value, batch, head, i, j):
            return value + band[batch, head, i, (i - j + shift).clamp(0, rows + 1)]

    sides = [t.transpose(1, 2).contiguous() for t in (call.content, key, value)]
    n, keys = query.shape[1], key.shape[1]
    mask = _block_mask(n, keys, call.offset, call.causal, call.causal_gap, call.window, query.device)
    out = shared.flex_attention()(
        *sides, score_mod=score, block_mask=mask, scale=call.factor, enable_gqa=key.shape[2] != query.shape[2]
    )
    return out.transpose(1, 2)


@functools.lru_cache(maxsize=8)  # a model would build the mask once for all layers
def _block_mask(n: int, keys: int, offset: int, causal, causal_gap, window, device):
    if not causal and window is None:
        return None
    from torch.nn.attention.flex_attention import create_block_mask

    def mask(batch, head, i, j):
        displacement = i + offset - j
        visible = displacement >= (causal_gap if causal else -keys)
        return visible & (displacement < window) if window is not None else visible

    return create_block_mask(mask, None, None, n, keys, device=device)


def _score_bytes(case, itemsize: int, backward: bool) -> float:
    return shared.product(case, "BHNS") * itemsize * (8 if backward else 5)


OPERATOR = Operator(
    OP,
    ("out", "lse"),
    ("query", "key", "value", *BIASES),
    arguments,
    shared.outputs(OP, return_lse=True),
    work,
    rows=rows,
    row_axes=(1, 2),
)
BASELINES = shared.attention_baselines(OP, (eager, sdpa_bias, flex), _score_bytes, "key_mask")
