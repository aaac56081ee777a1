"""Initial weights with which a small model copies before it has learned anything: from its own context, and RETRO from
its neighbours.

To copy, three parts must fit: something writes beside each token the one before it, an attention looks for the current
token among those and takes what follows, and the readout recognises what was taken. Large models find this (an
induction circuit) in thousands of steps; in the minutes of a demonstration it has to be where training starts, for
RETRO and its baseline alike.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from retro_model.layers import encode_displacements

from .model import Retro

SHARPNESS = 24.0  # of the look at the token before: the tokens beside that one get a logit lower by about 16
MATCH = 2.0  # scale of queries: one matching token of 128 then takes about half of the attention
GAIN = 2.0  # scale of what is copied, beside a residual stream of unit scale
# of CCA: what self-attention has copied by then takes its share of the stream's norm
LATER_MATCH, LATER_GAIN = (8.0, 3.0)


def _rotation(width: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix: what it turns is nearly orthogonal to what it does not."""
    return torch.linalg.qr(torch.randn(width, width, generator=generator))[0]


@torch.no_grad()
def align(model: Retro, seed: int = 0) -> Tensor:
    """Embeddings of unit scale, which the first residual updates do not drown, and a readout that is their transpose,
    turned by a random rotation so that no token predicts itself. Returns: the rotation [d_model, d_model]."""
    generator = torch.Generator().manual_seed(seed)
    turn = _rotation(model.config.d_model, generator)
    model.embedding.weight.copy_(torch.randn(model.embedding.weight.shape, generator=generator))
    model.readout.weight.copy_(model.embedding.weight @ turn.T * model.config.d_model**-0.5)
    return turn


@torch.no_grad()
def start_copying(model: Retro, seed: int = 0) -> None:
    """`align`, then the circuit: layer 1 looks one token back, layer 2 copies from the context; in a RETRO the
    encoder's first attention looks one token back, and every chunked cross-attention copies from the neighbours.

    Everything stays trainable. A RETRO and its baseline get the same weights wherever both have them.
    Raises: ValueError unless encoder and decoder share embeddings, every attention is as wide as the model, and CCA
    begins in layer 2 or later.
    Source: the circuit is that of Olsson et al., arXiv 2209.11895 (induction heads), within one sequence and across
    two.
    """
    c = model.config
    widths = {c.d_model, c.encoder_d_model, c.num_heads * c.head_dim, c.encoder_heads * c.encoder_head_dim}
    if not c.share_embeddings or len(widths) != 1 or c.num_layers < 2 or min(c.cca_layers, default=2) < 2:
        raise ValueError(
            "model: expected share_embeddings, d_model == encoder_d_model == heads * head_dim in both, two layers or "
            f"more, CCA from the second on; got share_embeddings={c.share_embeddings}, widths {sorted(widths)}, "
            f"num_layers={c.num_layers}, cca_layers={c.cca_layers}"
        )
    turn = align(model, seed)
    before = _rotation(c.d_model, torch.Generator().manual_seed(seed + 1))
    _look_one_back(model.layers[0].attention, before)
    _copy(model.layers[1].attention, before, turn, MATCH, GAIN)
    if c.retrieves:
        _look_one_back(model.encoder.layers[0].attention, before)
        for layer in c.cca_layers:
            _copy(model.layers[layer - 1].cca, before, turn, LATER_MATCH, LATER_GAIN)


def _copy(attention: nn.Module, before: Tensor, turn: Tensor, match: float, gain: float) -> None:
    """Attends the tokens that follow an occurrence of the current one, and writes them where the readout looks."""
    identity = torch.eye(attention.d_model)
    attention.query.weight.copy_(match * identity)
    attention.key.weight.copy_(before.T)
    attention.value.weight.copy_(identity)
    attention.output.weight.copy_(gain * turn)
    attention.positions.projection.weight.mul_(0.3)  # where a token stands matters less than which it is


def _look_one_back(attention: nn.Module, turn: Tensor) -> None:
    """Every head attends displacement 1, by the fastest waves of the positional encoding, and adds that token
    turned."""
    heads, dim, width = attention.num_heads, attention.head_dim, attention.d_model
    waves = torch.zeros(dim, width)
    waves[: dim // 2, : dim // 2] = torch.eye(dim // 2)  # sines
    waves[dim // 2 :, width // 2 : width // 2 + dim // 2] = torch.eye(dim // 2)  # cosines
    attention.positions.projection.weight.copy_(waves.repeat(heads, 1))
    attention.position_bias.copy_((SHARPNESS * waves @ encode_displacements(1, 1, width)[0]).expand(heads, dim))
    attention.query.weight.mul_(0.1)
    attention.value.weight.copy_(torch.eye(width))
    attention.output.weight.copy_(turn)
