"""Sizes of the demonstration: the default plan, and a tiny one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Sizes of a run.

    Args:
        config: arguments of `RetroConfig.small`; the vocabulary's size is added.
        database_bytes, train_bytes, validation_bytes: most characters to retrieve from, to train on (a part of the
            database) and to score.
        dim, index: width of the keys; FAISS factory string, None: exact search.
        neighbours, evaluation_neighbours: K in training; each K that is scored.
        start_copying: begin both models with weights that copy, see `retro.copying`.
    """

    config: dict
    vocab_size: int = 2048
    database_bytes: int = 12_000_000
    train_bytes: int = 2_500_000
    validation_bytes: int = 250_000
    dim: int = 512
    index: str | None = None
    neighbours: int = 2
    evaluation_neighbours: tuple[int, ...] = (2, 10)
    window: int = 512
    stride: int = 256
    batch_size: int = 4
    steps: int = 600
    max_lr: float = 1e-2
    warmup_steps: int = 50
    start_copying: bool = True


#: A decoder with CCA in its last layer, and an encoder of one layer that reads with the decoder's embeddings.
SMALL = {"d_model": 64, "d_ff": 256, "num_heads": 2, "num_layers": 3, "chunk_len": 16, "encoder_d_ff": 128}
SMALL |= {"share_embeddings": True, "max_len": 1024}
DEFAULT = Plan(SMALL)
SMOKE = Plan(
    SMALL | {"num_layers": 2},
    vocab_size=512,
    database_bytes=400_000,
    train_bytes=200_000,
    validation_bytes=30_000,
    dim=64,
    evaluation_neighbours=(2,),
    window=128,
    stride=64,
    steps=12,
    warmup_steps=2,
)
