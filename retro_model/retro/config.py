"""Configuration of a RETRO model, the presets of the paper's Table 2 and its count of parameters."""

from __future__ import annotations

from dataclasses import dataclass

from retro_model.base import checks
from retro_model.base.config import Config, layer_numbers, preset

#: Section 2.5 and Table 12. Table 10 lets models of 24 layers and more begin at 9, which does not fit the sizes of
#: Table 2.
FIRST_CCA_LAYER, CCA_LAYER_STEP = 6, 3

#: Table 2: (d_model, d_ff, num_heads, head_dim, num_layers)
PRESETS = {
    "172m": (896, 3584, 16, 64, 12),
    "425m": (1536, 6144, 12, 128, 12),
    "1.5b": (2048, 8192, 16, 128, 24),
    "7.5b": (4096, 16384, 32, 128, 32),
}


@dataclass(frozen=True)
class RetroConfig(Config):
    """Sizes of a RETRO decoder, its chunks and neighbours, and its neighbour encoder.

    Example:
        config = RetroConfig.preset("172m")
        tiny = RetroConfig(vocab_size=256, d_model=64, d_ff=256, num_heads=4, head_dim=16, num_layers=6, chunk_len=16,
                           neighbour_len=32, encoder_d_model=64, encoder_d_ff=256, encoder_heads=4, encoder_head_dim=16)

    Args:
        vocab_size: V, tokens of the vocabulary.
        d_model: d, width of the decoder; even, because half of a positional encoding is sines.
        d_ff: width of the decoder's feed-forward layers.
        num_heads, head_dim: H and D of the decoder's attentions; D a multiple of 8 from 16 to 256.
        num_layers: decoder layers.
        chunk_len: M, tokens per chunk.
        neighbour_len: R, tokens per neighbour; the paper has R = 2M: the neighbour chunk, then its continuation.
        num_neighbours: K in training; a model takes any K.
        cca_layers: P, the layers (from 1) with chunked cross-attention; None: every third from 6; (): a plain decoder.
        encoder_layers, encoder_d_model, encoder_d_ff, encoder_heads, encoder_head_dim: sizes of the neighbour encoder.
        encoder_cross_layers: P_enc, the encoder layers (from 1) that attend the retrieving chunk.
        share_embeddings: encoder and decoder use one token embedding; needs encoder_d_model == d_model.
        dropout: probability, in training, of dropping an attention weight or an entry of a residual update.
        max_len: longest sequence, in tokens. No parameter depends on it: positions are relative.

    Raises:
        TypeError, ValueError: naming the field.

    Source: Borgeaud et al., arXiv 2112.04426, sections 2.4 and 2.5, Table 2, Table 10 (P_enc).
    """

    vocab_size: int
    d_model: int
    d_ff: int
    num_heads: int
    head_dim: int
    num_layers: int
    chunk_len: int = 64
    neighbour_len: int = 128
    num_neighbours: int = 2
    cca_layers: tuple[int, ...] | None = None
    encoder_layers: int = 2
    encoder_d_model: int = 896
    encoder_d_ff: int = 3584
    encoder_heads: int = 16
    encoder_head_dim: int = 64
    encoder_cross_layers: tuple[int, ...] = (1,)
    share_embeddings: bool = False
    dropout: float = 0.0
    max_len: int = 2048

    def __post_init__(self):
        self.check_fields()
        why = "half of a positional encoding is sines"
        for name, width in (("d_model", self.d_model), ("encoder_d_model", self.encoder_d_model)):
            if width % 2:
                raise ValueError(f"{name}: expected an even width ({why}); got {width}")
        for name in ("head_dim", "encoder_head_dim"):
            checks.head_dim(name, getattr(self, name))
        layers = self.cca_layers
        if layers is None:  # 6, 9, 12, ..., counted from 1 (section 2.5)
            layers = tuple(range(FIRST_CCA_LAYER, self.num_layers + 1, CCA_LAYER_STEP))
        object.__setattr__(self, "cca_layers", layer_numbers("cca_layers", layers, "num_layers", self.num_layers))
        cross = layer_numbers("encoder_cross_layers", self.encoder_cross_layers, "encoder_layers", self.encoder_layers)
        object.__setattr__(self, "encoder_cross_layers", cross)
        if self.share_embeddings and self.encoder_d_model != self.d_model:
            wanted = f"encoder_d_model == d_model = {self.d_model} where embeddings are shared"
            raise ValueError(f"share_embeddings: expected {wanted}; got encoder_d_model={self.encoder_d_model}")
        checks.probability("dropout", self.dropout)

    @classmethod
    def preset(cls, name: str, vocab_size: int = 128_000) -> RetroConfig:
        """Return the configuration of a model of Table 2: "172m", "425m", "1.5b" or "7.5b"."""
        return cls(vocab_size, *preset(name, PRESETS))

    @classmethod
    def small(
        cls, vocab_size: int, d_model: int, d_ff: int, num_heads: int, num_layers: int, chunk_len: int, **fields
    ) -> RetroConfig:
        """Return a decoder whose last layer retrieves, with one encoder layer of the same sizes. fields: overrides.

        Example: RetroConfig.small(256, d_model=64, d_ff=128, num_heads=2, num_layers=3, chunk_len=8).encoder_heads == 2
        """
        sizes = {"d_model": d_model, "d_ff": d_ff, "head_dim": d_model // num_heads}
        encoder = {f"encoder_{name}": size for name, size in sizes.items()} | {"encoder_heads": num_heads}
        sizes |= {"vocab_size": vocab_size, "num_heads": num_heads, "num_layers": num_layers, "chunk_len": chunk_len}
        defaults = {"neighbour_len": 2 * chunk_len, "cca_layers": (num_layers,), "encoder_layers": 1}
        return cls(**sizes | encoder | defaults | fields)

    def baseline(self) -> RetroConfig:
        """Return the decoder without retrieval: no chunked cross-attention and no encoder (section 2.5)."""
        return self.replace(cca_layers=())

    @property
    def retrieves(self) -> bool:
        """Whether any layer has chunked cross-attention."""
        return bool(self.cca_layers)

    def num_parameters(self) -> int:
        """Count the weights as Table 2 does: projections and feed-forward matrices; no norms, biases or embeddings.

        Every attention has query, key, value and output projections, and a projection of the relative encodings from
        the width of its query side.

        Example: RetroConfig.preset("172m").num_parameters() == 172_490_752; its .baseline() has 132_120_576.
        """
        heads, encoder_heads = self.num_heads * self.head_dim, self.encoder_heads * self.encoder_head_dim
        d, d_enc = self.d_model, self.encoder_d_model
        total = self.num_layers * (5 * d * heads + 2 * d * self.d_ff)
        if not self.retrieves:
            return total
        total += self.encoder_layers * (5 * d_enc * encoder_heads + 2 * d_enc * self.encoder_d_ff)
        total += len(self.encoder_cross_layers) * (3 * d_enc + 2 * d) * encoder_heads
        return total + len(self.cca_layers) * (3 * d + 2 * d_enc) * heads
