"""FLOPs and fewest bytes of one case: what any implementation must compute and move, whatever it materialises.

FLOPs are those of the matrix products over the visible pairs, 2 a multiply-add; softmax and rotations are left out. The
backward counts a fused kernel's own recomputation, as is customary for attention: 5 products for the 2 of the forward,
and 3 for the 1 of the position logits. Bytes: every input that is needed read once, every output written once.
"""

from __future__ import annotations

from dataclasses import dataclass

LSE_BYTES = 4  # float32
INDEX_BYTES = 8  # int64
CONTENT_BACKWARD = 2.5  # recomputed logits, dP, dV, dQ, dK for logits and output
POSITION_BACKWARD = 3.0  # recomputed logits, d(query), d(rel_key)


@dataclass(frozen=True)
class Work:
    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)


def chunked_cross_attention(case, itemsize: int, mode: str) -> Work:
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
    return _attention(mode, content, position, query, memory, table, b * h * n * LSE_BYTES)


def relative_attention(case, itemsize: int, mode: str) -> Work:
    s = case.shape
    b, n, keys, h, d = (s[x] for x in "BNSHD")
    g, e = s.get("G", h), s.get("E", d)
    pairs, positioned = _pairs(case)
    content = 4.0 * b * pairs * h * d
    position = 2.0 * b * positioned * h * e if "rel_key" in case.extras else 0.0
    table = (h * s.get("T", n + keys - 1) * e if position else 0) * itemsize
    if "rel_query" in case.extras:
        table += b * n * h * e * itemsize
    return _attention(
        mode, content, position, b * n * h * d * itemsize, b * keys * g * d * itemsize, table, b * h * n * LSE_BYTES
    )


def _attention(
    mode: str, content: float, position: float, query: float, memory: float, table: float, lse: float
) -> Work:
    """`query`, `memory` (keys, and as much again for values), `table`, `lse` in bytes."""
    forward = Work(content + position, 2 * query + 2 * memory + table)
    if mode != "fwdbwd":
        return forward
    # reads q, k, v, rel_key, out, d(out), lse; writes the gradients of the first four
    moved = 4 * query + 4 * memory + 2 * table + lse
    return forward + Work(CONTENT_BACKWARD * content + POSITION_BACKWARD * position, moved + lse)


def _pairs(case) -> tuple[int, int]:
    """Visible (query, key) pairs of one head, and those of them whose displacement has a row in rel_key."""
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


def relative_logits(case, itemsize: int, mode: str) -> Work:
    s = case.shape
    b, n, keys, h, e = (s[x] for x in "BNSHE")
    flops = 2.0 * b * n * keys * h * e
    inputs = (b * n * h * e + h * s.get("T", n + keys - 1) * e) * itemsize
    logits = b * h * n * keys * itemsize
    forward = Work(flops, inputs + logits)
    return forward if mode != "fwdbwd" else forward + Work(2 * flops, 2 * inputs + logits)


def topk_chunks(case, itemsize: int, mode: str) -> Work:
    s, options = case.shape, case.options
    b, q, keys, d, k = (s[x] for x in "BQSDk")
    shared = s.get("key_batch", b)
    pairs = q * keys
    if (gap := options.get("causal_gap")) is not None:
        offset = options.get("query_offset", 0)
        pairs = sum(min(max(i + offset - gap + 1, 0), keys) for i in range(q))
    output_bytes = b * q * k * (4 + INDEX_BYTES)
    forward = Work(2.0 * b * pairs * d, (b * q * d + shared * keys * d) * itemsize + output_bytes)
    if mode != "fwdbwd":
        return forward
    slots = b * q * k
    return forward + Work(4.0 * slots * d, (2 * b * q * d + slots * d + shared * keys * d) * itemsize + output_bytes)


def leaky_average(case, itemsize: int, mode: str) -> Work:
    b, n, h, d = (case.shape[x] for x in "BNHD")
    elements = b * n * h * d
    forward = Work(2.0 * elements, 2 * elements * itemsize)
    # backward: reads d(y) and y, writes d(x); the recurrence, and one product a step for the gradient of the decay
    return forward if mode != "fwdbwd" else forward + Work(4.0 * elements, 3 * elements * itemsize)
