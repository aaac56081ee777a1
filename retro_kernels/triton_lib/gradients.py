"""Functions of both attentions' backward kernels: a block of queries with its statistics, and dropout."""

from __future__ import annotations

import triton
import triton.language as tl

from .dropout import dropout_keep
from .loads import load_query, load_rows
from .products import tile_product
from .softmax import LOG2E


@triton.jit
def load_statistics(lse_at, delta_at, i, row_mask):
    """(lse in base 2, delta) of a block of queries. A query that sees nothing has lse +inf, so probabilities are 0."""
    lse = tl.load(lse_at + i, mask=row_mask, other=float("-inf")) * LOG2E
    return tl.where(lse == float("-inf"), float("inf"), lse), tl.load(delta_at + i, mask=row_mask, other=0.0)


@triton.jit
def load_queries(q_from, do_from, bias_ptr, lse_at, delta_at, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(q + bias, dO, lse in base 2, delta) of a block of queries.

    q_from, do_from: base, indices of the rows, their mask and their stride. lse_at, delta_at: of the row with index 0.
    """
    q_base, i, row_mask, stride_qn = q_from
    do_base, _, _, stride_don = do_from
    _, q = load_query(q_base, bias_ptr, i, row_mask, stride_qn, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    do = load_rows(do_base, i.to(tl.int64), row_mask, stride_don, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    lse2, delta = load_statistics(lse_at, delta_at, i, row_mask)
    return q, do, lse2, delta


@triton.jit
def weight_of(excess):
    """Probabilities from the logits minus lse in base 2.

    The difference is at most 0 except for the rounding of lse, which reaches millions at huge logits. The bound keeps
    gradients finite there. NaN stays NaN.
    """
    return tl.exp2(tl.minimum(excess, 1.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def dropped(p, dp, seed_ptr, dropout, place):
    """(probabilities that the values were multiplied by, gradient of p), after dropout.

    dropout: limit and scale. place: indices of the keys and of the queries, which broadcast together, head and batch.
    """
    dropout_limit, dropout_scale = dropout
    key_index, query_index, head, batch = place
    kept = p
    if seed_ptr is not None:
        keep = dropout_keep(tl.load(seed_ptr), dropout_limit, key_index, query_index, head, batch)
        kept = tl.where(keep, p * dropout_scale, 0.0)
        dp = tl.where(keep, dp * dropout_scale, 0.0)
    return kept, dp


@triton.jit
def row_products(
    x, x_from, y, y_from, zero, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr
):
    """rowsum(x * y) [BLOCK_M]; delta where x and y are dO and O.

    In float32 it is rounded like the product dP: where a query sees one key, O is that key's value, and the two cancel.
    """
    if x.dtype == tl.float32:
        pairs = tile_product(x, x_from, None, y, y_from, zero, D, BLOCK_D, PRECISION)  # [BLOCK_M, BLOCK_M]
        row = tl.arange(0, BLOCK_M)
        return tl.sum(tl.where(row[:, None] == row[None, :], pairs, 0.0), 1)
    else:
        return tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
