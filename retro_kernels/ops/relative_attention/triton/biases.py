"""Addition of both biases to copies of the query, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ....core import layouts
from ....triton_lib.launch import Scalars, launch, power_of_two, strides
from ....triton_lib.loads import add_bias, load_rows
from ..call import RelativeAttention

_ROWS, _WARPS = 32, 4


@triton.jit
def _add(x_ptr, bias_ptr, out_ptr, rows, sizes, stride_x, stride_bias, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store a block of one head's rows plus its bias into the contiguous out [B,N,H,WIDTH].

    rows: indices of the rows and their mask, batch and head. sizes: N and H.
    """
    i, row_mask, batch, head = rows
    N, H = sizes
    base = x_ptr + batch * stride_x.b + head * stride_x.h
    x = load_rows(base, i.to(tl.int64), row_mask, stride_x.n, WIDTH, BLOCK)
    x = add_bias(x, bias_ptr + head * stride_bias.h, WIDTH, BLOCK)  # [BLOCK_M, BLOCK]
    column = tl.arange(0, BLOCK)
    out_at = out_ptr + (((batch * N + i) * H + head) * WIDTH)[:, None] + column[None, :]
    tl.store(out_at, x, mask=row_mask[:, None] & (column < WIDTH)[None, :])


@triton.jit(do_not_specialize=("N", "H"))
def _relative_biases_kernel(
    q_ptr, rq_ptr, content_ptr, position_ptr, query_ptr, rel_query_ptr,
    stride_q, stride_rq, stride_c, stride_p,
    N, H,
    D: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One (query block, head) and batch: query = q + content bias, rel_query = rq + position bias, where given."""
    head, batch = (tl.program_id(0) % H).to(tl.int64), tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) // H * BLOCK_M + tl.arange(0, BLOCK_M)
    rows, sizes = (i, i < N, batch, head), (N, H)
    if content_ptr is not None:
        _add(q_ptr, content_ptr, query_ptr, rows, sizes, stride_q, stride_c, D, BLOCK_D)
    if position_ptr is not None:
        _add(rq_ptr, position_ptr, rel_query_ptr, rows, sizes, stride_rq, stride_p, E, BLOCK_E)


def biased(call: RelativeAttention, few: int = 1) -> RelativeAttention:
    """Return the call with its biases added to copies of the query, one for content and one for position logits.

    A query that a kernel computes is an operand in registers (32 a thread at D = 128, twice), and the kernel spills; a
    query that it loads is an operand in shared memory. The copies are small compared with the keys that each block
    reads. For N <= few (decoding) the kernel adds the biases, which saves a launch.
    """
    query, rel_query, content = call.query, call.rel_query, call.content_bias
    position = None if call.rel_key is None else call.position_bias
    if query.shape[1] <= few or (content is None and position is None):
        return call
    rel_query = query if rel_query is None else rel_query
    b, n, h, d = query.shape
    e = rel_query.shape[-1]
    pairs = (content, query), (position, rel_query)
    added = [None if x is None else torch.empty_like(y, memory_format=torch.contiguous_format) for x, y in pairs]
    tensors = {"q_ptr": query, "rq_ptr": rel_query, "content_ptr": content, "position_ptr": position}
    tensors |= {"query_ptr": added[0], "rel_query_ptr": added[1]}

    def scalars() -> Scalars:
        sizes = strides(query, "q", "bnh") | strides(rel_query, "rq", "bnh")
        sizes |= strides(content, "c", "h") | strides(position, "p", "h") | {"N": n, "H": h, "D": d, "E": e}
        sizes |= {"BLOCK_M": _ROWS, "BLOCK_D": power_of_two(d), "BLOCK_E": power_of_two(e)}
        return Scalars((-(-n // _ROWS) * h, b), sizes, _WARPS, 1)

    launch(_relative_biases_kernel, tensors, layouts.current().once("biases", scalars))
    new = {"query": query if added[0] is None else added[0]}
    if call.rel_key is not None:
        new["rel_query"] = rel_query if added[1] is None else added[1]
    return call._replace(**new, content_bias=None, position_bias=None)
