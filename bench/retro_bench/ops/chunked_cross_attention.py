"""Chunked cross-attention in the harness: its cases, its work and its baselines.

The baselines follow RETRO's listing 1: shift the queries by M-1, fold them into chunks, attend in one batch.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ..registry import Case, Operator, Work
from . import _shared as shared
from ._shared import BIASES, CPU, DECODE, FORWARD, RETRO, RPT, TRANSFORMER_XL, inputs, torch

if TYPE_CHECKING:
    from torch import Tensor

OP = "chunked_cross_attention"
GATE_LOW = 0.1  # RPT: at least eta = 0.1
GATED, MASKED = ("neighbour_gate",), (*TRANSFORMER_XL, "neighbour_mask")
LATE = {"query_start": 2000}
USUAL = {"B": 1, "N": 2048, "M": 64, "K": 2, "R": 128, "H": 16, "D": 64}


def _case(name: str, source: str, shape: str = "", *, options=None, **more) -> Case:
    sizes = USUAL | shared.letters(shape)
    sizes["L"] = ((options or {}).get("query_start", 0) + sizes["N"]) // sizes["M"]
    return shared.case(OP, name, source, sizes, options=options or {}, **{"extras": TRANSFORMER_XL} | more)


CASES = [
    _case("retro-172m", f"{RETRO}, table 2, 172m: training sequence, K=2"),
    _case("retro-1.5b", f"{RETRO}, table 2, 1.5b, 8 sequences", "B=8 D=128", gpu=12),
    _case("retro-7.5b", f"{RETRO}, table 2, 7.5b, 4 sequences", "B=4 H=32 D=128", gpu=12),
    _case("rpt-2k", f"{RPT}, section 4: gated neighbours, no position logits", "H=8 D=128", extras=GATED, devices=CPU),
    _case("rpt-16k", f"{RPT}, section 4: its training length", "N=16384 H=8 D=128", extras=GATED, gpu=8),
    _case("eval-k10", f"{RETRO}, figure 1: evaluation with 10 neighbours, 512 tokens", "N=512 K=10", modes=FORWARD),
    _case("eval-k10-2k", f"{RETRO}, figure 1: evaluation with 10 neighbours", "K=10", modes=FORWARD, gpu=4),
    _case("eval-k40", f"{RETRO}, figure 1: evaluation with 40 neighbours", "K=40", modes=FORWARD, gpu=12),
    _case("masked-k4", f"{RETRO}, section 2.1: same-document neighbours filtered out", "N=512 K=4", extras=MASKED),
    _case("grouped", "grouped-query attention on the 1.5b shape", "H=16 G=4 D=128", gpu=8),
    _case("decode-1", f"{RETRO}, section 2.4: sampling, one token", "N=1", options=LATE, modes=DECODE),
    _case("decode-16", f"{RETRO}, section 2.4: a block of 16 tokens", "N=16", options=LATE, modes=DECODE),
]


def arguments(case, draw) -> dict[str, Any]:
    s, options = case.shape, dict(case.options)
    start = options.get("query_start", 0)
    kwargs = inputs.cross_attention(
        **{x: s[x] for x in "BNMKRHD"},
        **shared.position_arguments(case, "all"),
        G=s.get("G"),
        query_start=start,
        extra_chunks=s["L"] - (start + s["N"]) // s["M"],
        gate="neighbour_gate" in case.extras,
        gate_low=GATE_LOW,
        mask="neighbour" if "neighbour_mask" in case.extras else None,
        share=shared.SHARE,
        draw=draw,
    )
    del kwargs["dropout_p"]  # no baseline has dropout
    return kwargs | options


def work(case, itemsize: int, mode: str) -> Work:
    s = case.shape
    b, n, m, k, r, h, d = (s[x] for x in "BNMKRHD")
    g, e, start = s.get("G", h), s.get("E", d), case.options.get("query_start", 0)
    attending = n - max(min(m - 1 - start, n), 0)  # the first M-1 tokens attend nothing
    chunks = (start + n) // m - max((start + 1) // m - 1, 0)
    positions = "rel_key" in case.extras
    content = 4.0 * b * attending * k * r * h * d
    position = 2.0 * b * attending * r * h * e if positions else 0.0  # one row serves all K neighbours
    query = b * n * h * d * itemsize
    memory = b * chunks * k * r * g * d * itemsize
    table = (h * (m + r - 1) * e if positions else 0) * itemsize
    return shared.attention_work(mode, content, position, query, memory, table, b * h * n * shared.LSE_BYTES)


def rows(call: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """Cut to queries first .. last-1 and the chunks that they attend. Gradients of whole key tensors would be slow."""
    m = call["chunk_len"]
    start = call.get("query_start", 0) + first
    low = max((start + 1) // m - 1, 0)
    high = max((start + last - first) // m, low)
    cut = shared.cut(call, ("query", "rel_query"), first, last)
    cut = shared.cut(cut, ("key", "value", "neighbour_mask", "neighbour_gate"), low, high)
    return cut | {"query_start": start - low * m}


@dataclasses.dataclass
class Arguments(shared.Attention):
    """Arguments of the op that the baselines serve, and their tensors folded by attended chunk."""

    chunk_len: int = 0
    neighbour_mask: Tensor | None = None
    neighbour_gate: Tensor | None = None
    query_start: int = 0

    def fold(self, query: Tensor) -> Tensor:
        """Fold [B,N,H,D] by attended chunk to [B,C,M,H,D], with zero rows before the first and after the last token."""
        front = (self.query_start + 1) % self.chunk_len
        padding = (0, 0, 0, 0, front, -(front + query.shape[1]) % self.chunk_len)
        folded = torch.nn.functional.pad(query, padding).unflatten(1, (-1, self.chunk_len))
        return folded[:, 1:] if self.query_start + 1 < self.chunk_len else folded

    def unfold(self, out: Tensor) -> Tensor:
        """Unfold [B,C,M,H,D] to [B,N,H,D]. Rows before the first chunk are 0."""
        out, n, late = out.flatten(1, 2), self.query.shape[1], self.query_start + 1
        if late < self.chunk_len:
            return torch.nn.functional.pad(out, (0, 0, 0, 0, self.chunk_len - late, 0))[:, :n]
        return out[:, late % self.chunk_len : late % self.chunk_len + n]

    def attended(self, chunks: Tensor) -> Tensor:
        """Cut [B,L,...] to the attended chunks, [B,C,...]."""
        first, last = self.query_start + 1, self.query_start + self.query.shape[1]
        return chunks[:, max(first // self.chunk_len - 1, 0) : last // self.chunk_len]

    def folded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query [B,C,M,H,D] with its content bias, and gated key and value [B,C,K*R,H,D]."""
        sides = [self.attended(t) for t in (self.key, self.value)]
        if self.neighbour_gate is not None:
            sides = [t * self.attended(self.neighbour_gate)[..., None, None, None] for t in sides]
        heads = self.query.shape[2]
        return self.fold(self.content), *(shared.repeat_groups(t.flatten(2, 3), heads) for t in sides)

    def bias(self) -> Tensor | None:
        """Return the position logits [B,C,H,M,R], the same for all K neighbours."""
        if self.rel_key is None:
            return None
        length = self.key.shape[3]
        return shared.position_bias(self.fold(self.position), self.rel_key, length, 1 - length, self.rel_start)

    def visible(self) -> Tensor | None:
        """Return the visible neighbour tokens, bool [B,C,1,1,K*R]."""
        if self.neighbour_mask is None:
            return None
        mask = self.attended(self.neighbour_mask)
        mask = mask if mask.dim() == 4 else mask.unsqueeze(-1).expand(-1, -1, -1, self.key.shape[3])
        return mask.flatten(2)[:, :, None, None]


def eager(query, key, value, **options) -> Tensor:
    """Attend with every logit in memory."""
    call = Arguments(query, key, value, **options)
    queries, keys, values = call.folded()
    logits, bias = torch.einsum("bcmhd,bcshd->bchms", queries, keys), call.bias()
    if bias is not None:
        logits = logits + bias.repeat(1, 1, 1, 1, key.shape[2])
    return call.unfold(shared.attend(logits * call.factor, call.visible(), values, "bchms,bcshd->bcmhd"))


def sdpa_bias(query, key, value, **options) -> Tensor:
    """Attend the folded chunks by torch's SDPA, with the position logits as additive mask."""
    call = Arguments(query, key, value, **options)
    queries, keys, values = call.folded()
    bias, visible = call.bias(), call.visible()
    mask = None if bias is None else (bias * call.factor).repeat(1, 1, 1, 1, key.shape[2])
    if visible is not None:
        b, chunks, rows, h, _ = queries.shape
        mask = query.new_zeros(b, chunks, h, rows, keys.shape[2]) if mask is None else mask
        mask = mask.masked_fill(~visible, shared.hidden(query.dtype))
    sides = [_flat(t) for t in (queries, keys, values)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *sides, attn_mask=None if mask is None else mask.flatten(0, 1), scale=call.factor
    )
    out = _unflat(out, queries)
    return call.unfold(out if visible is None else out * visible.any(-1)[..., None])


def flex(query, key, value, **options) -> Tensor:
    """Attend the folded chunks by FlexAttention, which captures the position logits [B*C,H,M,R]."""
    call = Arguments(query, key, value, **options)
    queries, keys, values = call.folded()
    length, score, bias = key.shape[3], None, call.bias()
    if bias is not None:
        captured = (bias * call.factor).flatten(0, 1)

        def score(value, sequence, head, i, j):
            return value + captured[sequence, head, i, j % length]

    sides = [_flat(t).contiguous() for t in (queries, keys, values)]
    out = shared.flex_attention()(*sides, score_mod=score, scale=call.factor)
    return call.unfold(_unflat(out, queries))


def _flat(tensor: Tensor) -> Tensor:
    """Put [B,C,rows,H,D] into the layout of torch's attention, [B*C,H,rows,D]."""
    return tensor.flatten(0, 1).transpose(1, 2)


def _unflat(out: Tensor, like: Tensor) -> Tensor:
    return out.transpose(1, 2).unflatten(0, like.shape[:2])


def _score_bytes(case, itemsize: int, backward: bool) -> float:
    """Return the bytes of logits, position logits and probabilities, and of their gradients."""
    return shared.product(case, "BHNKR") * itemsize * (7 if backward else 4)


OPERATOR = Operator(
    OP,
    ("out", "lse"),
    ("query", "key", "value", *BIASES, "neighbour_gate"),
    arguments,
    shared.outputs(OP, return_lse=True),
    work,
    rows=rows,
    row_axes=(1, 2),
    row_elements=lambda case: shared.product(case, "BHKR"),
)
BASELINES = shared.attention_baselines(OP, (eager, sdpa_bias, flex), _score_bytes, "neighbour_mask")
