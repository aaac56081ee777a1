"""Initial weights of a stack of residual layers."""

from __future__ import annotations

from torch import nn

from .attention import Attention


def initialise(stack: nn.Module, branches: int) -> None:
    """Draw the weights of a stack of residual layers from N(0, 1/fan_in); set biases to 0 and norms to 1.

    Matrices that write to the residual stream, the `output` of attentions and feed-forward layers, are scaled by
    1/sqrt(branches), so that the stream's variance does not grow with depth.

    Args:
        stack: the module that holds the layers; embeddings get N(0, 1/width).
        branches: number of residual updates on the stream.

    Source: the depth scaling is GPT-2's (Radford et al., 2019, section 2.3).
    """
    writers = {id(getattr(module, "output", None)) for module in stack.modules()}
    for module in stack.modules():
        if isinstance(module, nn.Linear):
            depth = branches if id(module) in writers else 1
            nn.init.normal_(module.weight, std=(module.in_features * depth) ** -0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Attention):
            module.reset_parameters()
