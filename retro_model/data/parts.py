"""Only a part of each neighbour: N, the chunk that was found, or F,
what follows it. For ablations (appendix D of arXiv 2112.04426).
"""

from __future__ import annotations

import numpy as np
import torch

PARTS = ("N", "F")


class OnlyPart:
    """A database whose values are N or F alone, [...,M] in place of [...,2M]; all else is the database's.

        # with RetroConfig(neighbour_len=M)
        training.batches(store, neighbours=neighbours, database=OnlyPart(database, "F"), ...)

    Args:
        database: a `ChunkDatabase`.
        part: "N" or "F".
    """

    def __init__(self, database, part: str) -> None:
        if part not in PARTS:
            raise ValueError(f"part: expected 'N' or 'F'; got {part!r}")
        self.database, self.part = database, part

    def __getattr__(self, name: str):
        if name == "database":  # while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.database, name)

    def __len__(self) -> int:
        return len(self.database)

    def values(self, ids) -> tuple[np.ndarray, np.ndarray] | tuple[torch.Tensor, torch.Tensor]:
        """Tokens and mask [...,M] of chunks [...]; see `ChunkDatabase.values`."""
        tokens, mask = self.database.values(ids)
        m = tokens.shape[-1] // 2
        here = slice(0, m) if self.part == "N" else slice(m, None)
        return tokens[..., here], mask[..., here]
