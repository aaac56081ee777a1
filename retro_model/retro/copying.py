"""Initial weights with which a small model copies before training: from its context, and RETRO from its neighbours.

Copying is an induction circuit of three parts. One attention writes the previous token into each token's state. A
second attention looks up the current token among those and takes the token that follows. The readout recognises that
token. Large models learn the circuit in thousands of steps. A demonstration of minutes starts with it, RETRO and its
baseline alike.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from retro_model.layers import encode_displacements

from .model import Retro

SHARPNESS = 24.0  # of the attention to the previous token: the logits of its neighbours are lower by about 16
MATCH = 2.0  # scale of queries: one matching token of 128 takes about half of the attention
GAIN = 2.0  # scale of the copied token, beside a residual stream of unit scale
# of CCA: larger, because the stream's norm then includes the token copied by self-attention
LATER_MATCH, LATER_GAIN = (8.0, 3.0)


def _rotation(width: int, generator: torch.Generator) -> Tensor:
    """Return a random orthogonal matrix, which turns a vector into a nearly orthogonal one."""
    return torch.linalg.qr(torch.randn(width, width, generator=generator))[0]


@torch.no_grad()
def align(model: Retro, seed: int = 0) -> Tensor:
    """Set embeddings of unit scale and, as readout, their transpose times a random rotation.

    At unit scale the embeddings are not small beside the first residual updates. The rotation keeps a token from
    predicting itself. Returns the rotation [d_model, d_model].
    """
    generator = torch.Generator().manual_seed(seed)
    turn = _rotation(model.config.d_model, generator)
    model.embedding.weight.copy_(torch.randn(model.embedding.weight.shape, generator=generator))
    model.readout.weight.copy_(model.embedding.weight @ turn.T * model.config.d_model**-0.5)
    return turn


@torch.no_grad()
def start_copying(model: Retro, seed: int = 0) -> None:
    """Call `align`, then set the circuit: layer 1 attends the previous token, layer 2 copies from the context.

    In a RETRO the encoder's first attention attends the previous token, and every chunked cross-attention copies from
    the neighbours. All weights stay trainable. A RETRO and its baseline get equal weights in the layers that both have.

    Raises: ValueError unless encoder and decoder share embeddings, every attention is as wide as the model, and CCA
        begins in layer 2 or later.
    Source: induction heads, Olsson et al., arXiv 2209.11895, within one sequence and across two.
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
    """Attend the tokens that follow an occurrence of the current one, and write them turned, as the readout expects."""
    identity = torch.eye(attention.d_model)
    attention.query.weight.copy_(match * identity)
    attention.key.weight.copy_(before.T)
    attention.value.weight.copy_(identity)
    attention.output.weight.copy_(gain * turn)
    attention.positions.projection.weight.mul_(0.3)  # weaken positions against contents


def _look_one_back(attention: nn.Module, turn: Tensor) -> None:
    """Attend displacement 1 in every head, by the fastest waves of the encoding, and add that token, turned."""
    heads, dim, width = attention.num_heads, attention.head_dim, attention.d_model
    waves = torch.zeros(dim, width)
    waves[: dim // 2, : dim // 2] = torch.eye(dim // 2)  # sines
    waves[dim // 2 :, width // 2 : width // 2 + dim // 2] = torch.eye(dim // 2)  # cosines
    attention.positions.projection.weight.copy_(waves.repeat(heads, 1))
    attention.position_bias.copy_((SHARPNESS * waves @ encode_displacements(1, 1, width)[0]).expand(heads, dim))
    attention.query.weight.mul_(0.1)
    attention.value.weight.copy_(torch.eye(width))
    attention.output.weight.copy_(turn)
