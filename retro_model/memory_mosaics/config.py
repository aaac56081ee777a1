"""Configuration of a Memory Mosaic, and the paper's presets."""

from __future__ import annotations

from dataclasses import dataclass

from retro_kernels.checks import HEAD_DIM_MAX
from retro_model.base import checks
from retro_model.base.config import Config, preset

#: blocks N_b of the paper's language models (section 5, appendix B); all are 768 wide with 12 heads
PRESETS = {"small-1": 1, "small": 12, "small-18": 18}
PAPER_DROPOUT = 0.05  # of attention weights and of residual updates, in the authors' training


@dataclass(frozen=True)
class MosaicsConfig(Config):
    """Sizes of a Memory Mosaic. No size depends on a sequence's length, because the model has no positions.

    Example:
        config = MosaicsConfig.preset("small")   # 123,588,336 parameters, like GPT2-small
        tiny = MosaicsConfig(vocab_size=256, d_model=64, num_heads=4, num_layers=2, persistent_slots=224)

    Args:
        vocab_size: V, tokens of the vocabulary.
        d_model: d, width of the residual stream; num_heads divides it.
        num_heads: h, contextual memories of a block and persistent memories of a block (N_c = N_p).
        num_layers: N_b, blocks.
        persistent_slots: N_m, pairs in each persistent memory. 3.5 d gives a block the size of a transformer's.
        attention_dropout, output_dropout: probability, in training, of dropping a pair from a read, or an entry of a
            residual update.
        logit_scale, embedding_std: logits are logit_scale * E x, E starts as N(0, embedding_std^2). The authors' two
            versions have (1, 0.02) and (d**-0.5, 1).

    Raises:
        TypeError, ValueError: naming the field.

    Source: Zhang et al., "Memory Mosaics", arXiv 2405.06394, section 5, figure 8 and appendix B.
    """

    vocab_size: int
    d_model: int = 768
    num_heads: int = 12
    num_layers: int = 12
    persistent_slots: int = 2688
    attention_dropout: float = 0.0
    output_dropout: float = 0.0
    logit_scale: float = 1.0
    embedding_std: float = 0.02

    max_len = None  # no limit on a sequence's length

    def __post_init__(self):
        self.check_fields()
        for name, value in (("logit_scale", self.logit_scale), ("embedding_std", self.embedding_std)):
            if value <= 0:
                raise ValueError(f"{name}: expected a number > 0; got {value}")
        for name in ("attention_dropout", "output_dropout"):
            checks.probability(name, getattr(self, name))
        check_heads(self.d_model, self.num_heads)

    @classmethod
    def preset(cls, name: str, vocab_size: int = 50_304) -> MosaicsConfig:
        """Return a language model of the paper: "small" (12 blocks, as GPT2-small), "small-1" or "small-18"."""
        dropout = {"attention_dropout": PAPER_DROPOUT, "output_dropout": PAPER_DROPOUT}
        return cls(vocab_size, num_layers=preset(name, PRESETS), **dropout)


def check_heads(d_model: int, num_heads: int) -> int:
    """Return the width of a head. Raise ValueError unless num_heads divides d_model and the width is supported."""
    checks.integer("d_model", d_model, low=1)
    checks.integer("num_heads", num_heads, low=1)
    if d_model % num_heads or d_model // num_heads > HEAD_DIM_MAX:
        wanted = f"a divisor of d_model={d_model} that leaves heads at most {HEAD_DIM_MAX} wide"
        raise ValueError(f"num_heads: expected {wanted}; got {num_heads}")
    return d_model // num_heads
