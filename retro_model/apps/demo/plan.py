"""Sizes of the demonstration: the default, and one to see that it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Sizes of a run.

    config: fields of RetroConfig but vocab_size. database_bytes, train_bytes, validation_bytes: text to retrieve from,
    to train on (part of the former), to score; at most. dim, index: width of the embeddings, FAISS factory string
    (None: exact search).
    neighbours, evaluation_neighbours: K in training and the Ks that are scored. start_copying: both models begin with
    the weights of `copying`.
    sample_tokens: generated.
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
    sample_tokens: int = 160


def _small(width: int, layers: int, chunk_len: int) -> dict:
    """A decoder with CCA in its last layer, and an encoder of one layer that reads with the decoder's embeddings."""
    return {
        "d_model": width,
        "d_ff": 4 * width,
        "num_heads": 2,
        "head_dim": width // 2,
        "num_layers": layers,
        "chunk_len": chunk_len,
        "neighbour_len": 2 * chunk_len,
        "cca_layers": (layers,),
        "encoder_layers": 1,
        "encoder_d_model": width,
        "encoder_d_ff": 2 * width,
        "encoder_heads": 2,
        "encoder_head_dim": width // 2,
        "share_embeddings": True,
        "max_len": 1024,
    }


DEFAULT = Plan(_small(64, 3, 16))
SMOKE = Plan(
    _small(64, 2, 16),
    vocab_size=512,
    database_bytes=400_000,
    train_bytes=200_000,
    validation_bytes=30_000,
    dim=64,
    index=None,
    evaluation_neighbours=(2,),
    window=128,
    stride=64,
    steps=12,
    warmup_steps=2,
    sample_tokens=40,
)
