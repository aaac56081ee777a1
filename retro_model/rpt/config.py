"""Configuration of a Retrieval-Pretrained Transformer, and the paper's models."""

from __future__ import annotations

from dataclasses import dataclass

from retro_model.base import checks
from retro_model.base.config import Config, layer_numbers, preset

WINDOWS = ("segments", "sliding")
VOCAB_SIZE = 50_277  # GPT-NeoX's tokens, section 3.4
OWN = -2  # in an index: take the retriever's choice


@dataclass(frozen=True)
class RPTConfig(Config):
    """Sizes and switches of a Retrieval-Pretrained Transformer.

    Example:
        config = RPTConfig.preset("rpt")  # 242 million weights, Table 2
        tiny = RPTConfig(vocab_size=256, d_model=64, d_ff=256, num_heads=2, num_layers=4, cca_layers=(3, 4),
                         chunk_len=16, segment=64, excluded_chunks=8)

    Args:
        vocab_size: V, tokens of the vocabulary.
        d_model: d, width everywhere.
        d_ff: width of the feed-forward layers.
        num_heads: H, of every attention; d_model / num_heads is D, a multiple of 8 from 16 to 256.
        num_layers: n; the first n // 2 feed the retriever, the others may read neighbours.
        cca_layers: the upper layers (from 1) with chunked cross-attention; (): a plain decoder with a window.
        chunk_len: m (the kernels' M), tokens per chunk.
        num_neighbours: K in training; a model takes any K.
        segment: S, the stride of the window: a token attends its own segment and the one before.
        excluded_chunks: w, chunk i retrieves chunks j <= i - w. The paper's 2S/m excludes the chunks in the window.
        gate_floor: eta, the least value of a gate; 1: no gate.
        gated_ffn: a feed-forward layer of three matrices (SwiGLU).
        null_slot: one learned key and value a head, without position, in every cross- and bidirectional attention.
        score_scale: multiplies q·k; the margin of the retrieval loss is in units of the score.
        query_norm, key_norm: RMSNorm before W_Q, before W_K.
        retriever: False: no chunk attention, W_Q or W_K; every call passes the neighbours (RETRO with BM25).
        tie_embeddings: the readout is the embedding's transpose; False: a separate matrix.
        window: "segments" (S+1 to 2S keys a token) or "sliding" (the last 2S).
        dropout: probability, in training, of dropping an attention weight or an entry of a residual update.

    Raises:
        TypeError, ValueError: naming the field.

    Source: Rubin and Berant, arXiv 2306.13421, sections 3.1 and 3.4, appendix B, Table 2.
    """

    vocab_size: int
    d_model: int = 1024
    d_ff: int = 4096
    num_heads: int = 8
    num_layers: int = 12
    cca_layers: tuple[int, ...] = (8, 9, 10, 11, 12)
    chunk_len: int = 64
    num_neighbours: int = 2
    segment: int = 1024
    excluded_chunks: int = 32
    gate_floor: float = 0.1
    gated_ffn: bool = False
    null_slot: bool = False
    score_scale: float = 1.0
    window: str = "segments"
    dropout: float = 0.0
    query_norm: bool = False
    key_norm: bool = False
    retriever: bool = True
    tie_embeddings: bool = True

    max_len = None  # no limit, because positions are relative and attention has a window

    def __post_init__(self):
        self.check_fields()
        if self.d_model % self.num_heads:
            raise ValueError(f"num_heads: expected a divisor of d_model={self.d_model}; got {self.num_heads}")
        checks.head_dim("d_model / num_heads", self.head_dim)
        upper = (self.lower_layers + 1, "layers of the upper half,")
        layers = layer_numbers("cca_layers", self.cca_layers, "num_layers", self.num_layers, *upper)
        object.__setattr__(self, "cca_layers", layers)
        checks.probability("dropout", self.dropout)
        if not 0 <= self.gate_floor <= 1:
            raise ValueError(f"gate_floor: expected a number in [0, 1]; got {self.gate_floor}")
        if self.window not in WINDOWS:
            raise ValueError(f"window: expected one of {WINDOWS}; got {self.window!r}")

    @classmethod
    def preset(cls, name: str, vocab_size: int = VOCAB_SIZE) -> RPTConfig:
        """Return a model of Table 2: "rpt", "retro-bm25" (no retriever) or "transformer-xl" (no neighbours)."""
        whole = cls(vocab_size, dropout=0.05)
        presets = {"rpt": whole, "retro-bm25": whole.replace(retriever=False), "transformer-xl": whole.baseline()}
        return preset(name, presets)

    def baseline(self) -> RPTConfig:
        """Return the decoder without neighbours, the paper's Transformer-XL."""
        return self.replace(cca_layers=(), retriever=False)

    @property
    def head_dim(self) -> int:
        """D."""
        return self.d_model // self.num_heads

    @property
    def lower_layers(self) -> int:
        """Layers below the retriever."""
        return self.num_layers // 2

    @property
    def neighbour_len(self) -> int:
        """R = 2m, tokens of a neighbour: a chunk and its successor."""
        return 2 * self.chunk_len

    @property
    def uses_neighbours(self) -> bool:
        """Whether any layer reads neighbours."""
        return bool(self.cca_layers)

    def num_parameters(self) -> int:
        """Count the weights of the matrices, the embedding included, without norms, w_ng and null slots.

        Example: RPTConfig.preset("rpt").num_parameters() == 242_324_480
        """
        d, feed_forward = self.d_model, (3 if self.gated_ffn else 2) * self.d_model * self.d_ff
        total = (1 if self.tie_embeddings else 2) * self.vocab_size * d + self.num_layers * (4 * d * d + feed_forward)
        if not self.uses_neighbours:
            return total
        total += (len(self.cca_layers) + 3) * 4 * d * d  # 3: both attentions of the neighbours, and the gate's
        return total + (6 * d * d if self.retriever else 0)
