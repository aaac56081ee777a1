"""Initial weights with which small models copy before training: from their context and from their neighbours.

Copying is an induction circuit of three parts. One attention writes the previous token into each token's state. A
second attention finds the current token among these states and takes the token that follows. The readout recognises
that token. Large models learn the circuit in thousands of steps. A model that trains for minutes starts with it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .positions import encode_displacements
from .rotary import rotate, rotation

SHARPNESS = 24.0  # scale of the query for the previous token: other tokens' logits are lower by about 16
MATCH = 2.0  # scale of queries: one matching token of 128 takes about half of the attention
GAIN = 2.0  # scale of the copied token in a residual stream of unit scale
# scales in CCA: larger, because the stream's norm then includes the token copied by self-attention
LATER_MATCH, LATER_GAIN = (8.0, 3.0)
# scales in an RPT
AHEAD = 1  # token; where a neighbour equals the chunk, the token to predict is the next one
CONSTANT = 2.0  # value of the embedding's first coordinate, in standard deviations of the others
RPT_SHARPNESS = 20.0  # factor on the query; tokens next to the one ahead get a logit that is lower by about 5


def _rotation(width: int, generator: torch.Generator) -> Tensor:
    """Return a random orthogonal matrix, which turns a vector into a nearly orthogonal one."""
    return torch.linalg.qr(torch.randn(width, width, generator=generator))[0]


@torch.no_grad()
def align(model: nn.Module, seed: int = 0) -> Tensor:
    """Set a Retro's embeddings to unit scale and its readout to their transpose times a random rotation.

    At unit scale the embeddings are not small compared with the first residual updates. The rotation keeps a token from
    predicting itself. Returns the rotation [d_model, d_model].
    """
    generator = torch.Generator().manual_seed(seed)
    turn = _rotation(model.config.d_model, generator)
    model.embedding.weight.copy_(torch.randn(model.embedding.weight.shape, generator=generator))
    model.readout.weight.copy_(model.embedding.weight @ turn.T * model.config.d_model**-0.5)
    return turn


@torch.no_grad()
def start_copying(model: nn.Module, seed: int = 0) -> None:
    """Call `align` for a Retro, then set the circuit.

    Layer 1 attends the previous token, and layer 2 copies from the context. In a RETRO the encoder's first attention
    attends the previous token, and every chunked cross-attention copies from the neighbours. All weights stay
    trainable. A RETRO and its baseline get equal weights in the layers that both have.

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


@torch.no_grad()
def start_rpt_copying(model: nn.Module) -> None:
    """Set the weights of an RPT with which every head of chunked cross-attention attends `AHEAD` and copies.

    The first coordinate of the embedding is constant, and queries and keys are made of it. Value and output start as
    the identity. All weights stay trainable. Which chunks to retrieve is still to be learned.
    """
    deviation = model.embedding.weight.std()
    model.embedding.weight[:, 0] = CONSTANT * deviation
    for cca in (layer.cca for layer in model.layers if layer.cca is not None):
        direction = torch.zeros(cca.head_dim)
        direction[::2] = 1.0  # one of each pair, so that every frequency counts
        ahead = rotate(direction.view(1, 1, -1), rotation(torch.tensor([AHEAD]), cca.head_dim)).flatten()
        for module, column in ((cca.query, ahead * RPT_SHARPNESS / CONSTANT**2), (cca.key, direction / deviation / 8)):
            module.weight.mul_(0.3)
            module.weight[:, 0] = column.repeat(cca.num_heads)
        for module in (cca.value, cca.output):
            module.weight.copy_(torch.eye(len(module.weight)))


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
