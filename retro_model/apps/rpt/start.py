"""Initial weights with which a small RPT copies from its neighbours: a large model learns them in thousands of steps.

Which chunks to retrieve is still to be learned.
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
    for cca in (layer.cca for layer in model.layers if layer.cca is not None):
        direction = torch.zeros(cca.head_dim)
        direction[::2] = 1.0  # one of each pair, so that every frequency counts
        ahead = rotate(direction.view(1, 1, -1), rotation(torch.tensor([AHEAD]), cca.head_dim)).flatten()
        for module, column in ((cca.query, ahead * SHARPNESS / CONSTANT**2), (cca.key, direction / deviation / 8)):
            module.weight.mul_(0.3)
            module.weight[:, 0] = column.repeat(cca.num_heads)
        for module in (cca.value, cca.output):
            module.weight.copy_(torch.eye(len(module.weight)))
