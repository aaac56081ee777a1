"""The gradient of logits, kept by the query kernel for the table's gradient: how much of it at a time.

Slabs of heads, then of batch entries, then of query blocks, each as large as `STORED_BYTES` allow: what one slab has
left of a table's gradient the next adds to, so the order of the sum is that of the slabs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ..call import RelativeAttention

#: Bound of the stored gradient in bytes, but for a single block of queries of one head that takes more.
STORED_BYTES = 512 << 20
#: parameters of the kernels that say which slab a launch serves
SLAB = ("first_batch", "first_block", "first_head", "heads", "ring")
_MOST_ELEMENTS = 2**31  # of one head: offsets within it are 32 bits


@dataclasses.dataclass(frozen=True)
class Slab:
    """Batch entries, query blocks and heads that two launches serve, `first` ones and how many."""

    first_batch: int
    batches: int
    first_block: int
    blocks: int
    first_head: int
    heads: int

    def arguments(self) -> dict[str, int]:
        """Return the kernels' arguments that name the slab."""
        names = ("first_batch", "first_block", "first_head", "heads")
        return {name: getattr(self, name) for name in names}

    def again(self, apart: bool) -> bool:
        """Whether an earlier slab had heads of the same table. apart: each head has a table of its own."""
        return bool(self.first_batch or self.first_block or (self.first_head and not apart))


def width(call: RelativeAttention, block_m: int, block_n: int) -> tuple[int, int | None]:
    """(columns, ring): key j stands in column j & ring, or j.

    Where a window ends what a block of queries sees, columns are used in turn.
    """
    keys = -(-call.key.shape[1] // block_n) * block_n
    seen = call.window or 2 * (call.window_block or 0)
    if call.causal and seen:
        ring = 1 << (seen + block_m + 2 * block_n - 1).bit_length()
        if ring < keys:
            return ring, ring - 1
    return keys, None


def slabs(call: RelativeAttention, columns: int, block_m: int) -> Iterator[Slab]:
    """Yield the slabs of a call in the order in which they are summed; the first is the largest."""
    b, n, h, _ = call.query.shape
    blocks = -(-n // block_m)
    bytes_of = block_m * columns * call.query.element_size()  # a block of queries
    most = max(STORED_BYTES // bytes_of, 1)
    at_once = min(blocks, most, max(_MOST_ELEMENTS // (block_m * columns), 1))
    batches = min(b, max(most // at_once, 1)) if at_once == blocks else 1
    heads = min(h, max(most // (at_once * batches), 1)) if batches == b else 1
    for head in range(0, h, heads):
        for batch in range(0, b, batches):
            for block in range(0, blocks, at_once):
                yield Slab(
                    batch,
                    min(batches, b - batch),
                    block,
                    min(at_once, blocks - block),
                    head,
                    min(heads, h - head),
                )
