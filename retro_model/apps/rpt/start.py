"""Initial weights with which a small RPT copies from its neighbours before it has learned anything.

A large model finds this circuit in thousands of steps; in the minutes of a demonstration it has to be where training
starts, for every model alike. It says how to read a neighbour, not which one to retrieve.
"""

from __future__ import annotations

import torch

from retro_model.layers.rotary import rotate, rotation
from retro_model.rpt.model import RPT

AHEAD = 1  # where the neighbour equals the chunk, the token to predict stands one further
CONSTANT = 2.0  # of the embedding's first coordinate, in units of the others' deviation
SHARPNESS = 20.0  # of the look one ahead: a token beside it gets a logit lower by about 5


@torch.no_grad()
def start_copying(model: RPT) -> None:
    """One coordinate of the embedding starts constant; every head of chunked cross-attention makes of it a query for
    the token that stands `AHEAD`, and its value and output start as the identity. Everything stays trainable."""
    deviation = model.embedding.weight.std()
    model.embedding.weight[:, 0] = CONSTANT * deviation
    for layer in model.layers:
        cca = layer.cca
        if cca is None:
            continue
        direction = torch.zeros(cca.head_dim)
        direction[::2] = 1.0  # one of each pair, so that every frequency counts
        ahead = rotate(direction.view(1, 1, -1), rotation(torch.tensor([AHEAD]), cca.head_dim)).flatten()
        for weight, column in (
            (cca.query.weight, ahead * SHARPNESS / CONSTANT**2),
            (cca.key.weight, direction / deviation / 8),
        ):
            weight.mul_(0.3)
            weight[:, 0] = column.repeat(cca.num_heads)
        for weight in (cca.value.weight, cca.output.weight):
            weight.copy_(torch.eye(len(weight)))
