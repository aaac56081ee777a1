"""How a GPU's backend splits the keys, and the causal limit and alignment that its kernels take."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

_ROUNDS = 4  # rounds of the device that all splits together take at most


class Split(NamedTuple):
    """The keys in `count` parts of `length` each, a multiple of the tile."""

    count: int
    length: int


def split(keys: int, tile: int, blocks: int, places: int, least: int) -> Split:
    """Return the split that leaves the smallest number of `places` idle in the last round; among several such splits,
    the one with the smallest number of parts.

    blocks: programs for one part. places: programs that run at once. least: tiles that a part has at least.

    >>> split(keys=10**6, tile=128, blocks=1, places=264, least=4)
    Split(count=261, length=3840)
    """
    tiles = -(-keys // tile)

    def busy(parts: int) -> float:
        return round(blocks * parts / (-(-blocks * parts // places) * places), 2)

    most = max(1, min(tiles // least, _ROUNDS * places // blocks))
    length = -(-tiles // max(range(1, most + 1), key=lambda parts: (busy(parts), -parts))) * tile
    return Split(-(-keys // length), length)


def aligned(tensor: Tensor, elements: int) -> bool:
    """Whether the length and strides of the rows are multiples of `elements`, and the address is one of 16 bytes."""
    steps = (tensor.shape[-1], *tensor.stride()[:-1])
    return all(step % elements == 0 for step in steps) and tensor.data_ptr() % 16 == 0
