"""Initial weights with which a small RPT copies from its neighbours before training.

A large model learns this circuit in thousands of steps. A demonstration has minutes, so every variant starts with it.
It reads a neighbour; which chunks to retrieve is still to be learned.
"""

from __future__ import annotations

import torch

from retro_model.layers.rotary import rotate, rotation
from retro_model.rpt.model import RPT

AHEAD = 1  # token; where a neighbour equals the chunk, the token to predict is the next one
CONSTANT = 2.0  # value of the embedding's first coordinate, in standard deviations of the others
SHARPNESS = 20.0  # factor on the query; tokens beside the one ahead get a logit lower by about 5


@torch.no_grad()
def start_copying(model: RPT) -> None:
    """Set the weights with which every head of chunked cross-attention attends `AHEAD` and copies.

    The first coordinate of the embedding is constant: queries and keys are made of it. Value and output start as the
    identity. All weights stay trainable.
    """
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
