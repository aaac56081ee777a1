"""Initial weights with which a small RETRO copies from its neighbours before it has learned anything.

To copy, three parts must fit: the encoder writes beside each neighbour token the one before it, chunked cross-attention looks for the
decoder's token among those and takes what follows, and the readout recognises what was taken. Large models find this (an induction
circuit) in thousands of steps. A baseline has no such circuit to be given, so a comparison that uses this must say so.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from retro_model.layers import encode_displacements
from retro_model.retro import Retro

SHARPNESS = 12.0  # of the encoder's look at the token before: the tokens beside that one get a logit lower by about 8
MATCH = 2.0  # scale of CCA's queries: one matching token of 128 then takes about half of the attention
GAIN = 2.0  # scale of what is copied, beside a residual stream of unit scale


def _rotation(width: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix: what it turns is nearly orthogonal to what it does not."""
    return torch.linalg.qr(torch.randn(width, width, generator=generator))[0]


@torch.no_grad()
def align(model: Retro, seed: int = 0, *, turned: bool = False) -> Tensor:
    """Embeddings of unit scale, which the first residual updates do not drown, and a readout that is their transpose.

    For a RETRO and its baseline alike. turned: the readout is turned by a random rotation, so that no token predicts itself.
    Returns: the rotation [d_model, d_model].
    """
    generator = torch.Generator().manual_seed(seed)
    turn = _rotation(model.config.d_model, generator) if turned else torch.eye(model.config.d_model)
    model.embedding.weight.copy_(torch.randn(model.embedding.weight.shape, generator=generator))
    model.readout.weight.copy_(model.embedding.weight @ turn.T * model.config.d_model**-0.5)
    return turn


@torch.no_grad()
def start_copying(model: Retro, seed: int = 0) -> None:
    """`align`, turned, then the encoder's first attention and every chunked cross-attention as in the module's docstring.

    Everything stays trainable.
    Raises: ValueError unless encoder and decoder share embeddings, and every attention is as wide as the model.
    Source: the circuit is that of Olsson et al., arXiv 2209.11895 (induction heads), across two sequences.
    """
    c = model.config
    widths = {c.d_model, c.encoder_d_model, c.num_heads * c.head_dim, c.encoder_heads * c.encoder_head_dim}
    if not c.retrieves or not c.share_embeddings or len(widths) != 1:
        raise ValueError(
            "model: expected a RETRO with share_embeddings and d_model == encoder_d_model == heads * head_dim in both; got "
            f"cca_layers={c.cca_layers}, share_embeddings={c.share_embeddings}, widths {sorted(widths)}"
        )
    turn = align(model, seed, turned=True)
    before = _rotation(c.d_model, torch.Generator().manual_seed(seed + 1))
    identity = torch.eye(c.d_model)
    _look_one_back(model.encoder.layers[0].attention, before)
    for layer in model.layers:
        if layer.cca is not None:
            layer.cca.query.weight.copy_(MATCH * identity)
            layer.cca.key.weight.copy_(before.T)
            layer.cca.value.weight.copy_(identity)
            layer.cca.output.weight.copy_(GAIN * turn)
            layer.cca.positions.projection.weight.mul_(0.3)  # where a token stands matters less than which it is


def _look_one_back(attention: nn.Module, turn: Tensor) -> None:
    """Every head attends displacement 1, by the fastest waves of the positional encoding, and adds that token turned."""
    heads, dim, width = attention.num_heads, attention.head_dim, attention.d_model
    waves = torch.zeros(dim, width)
    waves[: dim // 2, : dim // 2] = torch.eye(dim // 2)  # sines
    waves[dim // 2 :, width // 2 : width // 2 + dim // 2] = torch.eye(dim // 2)  # cosines
    attention.positions.projection.weight.copy_(waves.repeat(heads, 1))
    attention.position_bias.copy_((SHARPNESS * waves @ encode_displacements(1, 1, width)[0]).expand(heads, dim))
    attention.query.weight.mul_(0.1)
    attention.value.weight.copy_(torch.eye(width))
    attention.output.weight.copy_(turn)
