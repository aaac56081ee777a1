"""The layers that the models share, as stand-alone modules for a model of your own.

All take activations [B,N,d_model] and return a residual update of that shape; norm and addition are the caller's.
Attention runs in `retro_kernels`: `backend` names one of its backends, None picks the fastest.
"""

from .attention import Attention, RelativeAttention
from .cache import KeyValueCache
from .chunked_cross_attention import ChunkedCrossAttention
from .drop_in import RMSNorm
from .feed_forward import FeedForward
from .initialisation import initialise
from .loss import NextTokenLoss, linear_cross_entropy, next_token_loss
from .positions import RelativePositions, encode_displacements
from .rotary import RotaryAttention, Rotation, rotate, rotation

__all__ = ["Attention", "ChunkedCrossAttention", "FeedForward", "KeyValueCache", "NextTokenLoss", "RMSNorm"]
__all__ += ["RelativeAttention", "RelativePositions", "RotaryAttention", "Rotation"]
__all__ += ["encode_displacements", "initialise", "linear_cross_entropy", "next_token_loss", "rotate", "rotation"]
