"""Fused kernels for retrieval-enhanced language models, as PyTorch operators.

    import retro_kernels as rk

    out = rk.chunked_cross_attention(query, key, value, chunk_len=64, rel_key=rel_key)

Importing this package imports no triton and touches no device.
"""

from . import extensions  # noqa: F401  records this process's id; extensions are loaded on first use
from ._version import __version__
from .compile.warm_up import warm_up
from .core.dispatch import BackendStatus, backends, use_backend
from .ops.chunked_cross_attention import chunked_cross_attention
from .ops.cross_entropy import cross_entropy
from .ops.leaky_average import leaky_average
from .ops.merge_attention import merge_attention
from .ops.relative_attention import relative_attention
from .ops.relative_logits import relative_logits
from .ops.rms_norm import rms_norm
from .ops.topk_chunks import topk_chunks
from .ops.topk_chunks.stream import TopkStream, topk_merge, topk_rescore

__all__ = [
    "BackendStatus",
    "TopkStream",
    "__version__",
    "backends",
    "chunked_cross_attention",
    "cross_entropy",
    "leaky_average",
    "merge_attention",
    "relative_attention",
    "relative_logits",
    "rms_norm",
    "topk_chunks",
    "topk_merge",
    "topk_rescore",
    "use_backend",
    "warm_up",
]
