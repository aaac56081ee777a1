"""Decoders of the Hugging Face library as the evaluation calls models: tokens in, losses or activations out."""

from __future__ import annotations

from torch import Tensor, nn

from retro_model.layers import NextTokenLoss
from retro_model.layers.loss import linear_cross_entropy
from retro_model.retrofit.decoders import base_of, last_only, readout_of


class Decoder(nn.Module):
    """Causal decoder without retrieval. Logits that are a product of its readout's weight are made for counted tokens.

    decoder: called as decoder(input_ids). Its weights and its mode stay as they are.
    """

    def __init__(self, decoder: nn.Module):
        super().__init__()
        self.decoder = decoder
        self.train(decoder.training)
        self.config = base_of(decoder).config
        self._readout = readout_of(decoder)  # its name
        self.sums_losses = self._readout is not None

    def forward(self, tokens: Tensor, *, loss_mask: Tensor | None = None) -> Tensor | NextTokenLoss:
        """Return logits [B,N,V], or with `loss_mask` [B,N] the losses of the tokens that it selects, like
        `Retro.forward`.
        """
        if loss_mask is None:
            return self.decoder(tokens).logits
        counted = loss_mask[:, 1:]
        hidden, targets = self.activations(tokens)[:, :-1][counted], tokens[:, 1:][counted]
        total, terms = linear_cross_entropy(hidden, self._head.weight, targets)
        losses = terms.new_zeros(counted.shape)
        losses[counted] = terms
        return NextTokenLoss(total, losses)

    def activations(self, tokens: Tensor) -> Tensor:
        """Return the readout's input [B,N,d].

        Raises: ValueError where the logits are made of more than it.
        """
        if self._readout is None:
            want = "a decoder whose logits are a product of its last states and its readout's weight"
            raise ValueError(f"model: expected {want}; got {type(self.decoder).__name__}")
        with last_only(self.decoder, self._readout) as inputs:
            self.decoder(tokens)
        return inputs[0]

    def readout(self, hidden: Tensor) -> Tensor:
        """Logits [...,V] of activations [...,d]."""
        return self._head(hidden)

    @property
    def _head(self) -> nn.Module:
        return self.decoder.get_submodule(self._readout)


def as_ours(model: nn.Module) -> nn.Module:
    """Return a model that `training.batch_loss` takes.

    This is the model inside a Hugging Face retrofit, a `Decoder` around another decoder of that library, or the model
    itself.
    """
    within = getattr(model, "model", None)
    if getattr(within, "sums_losses", False):
        return within
    if getattr(model, "sums_losses", False) or not hasattr(base_of(model), "get_output_embeddings"):
        return model
    return Decoder(model)


def without_retrieval(model: nn.Module) -> nn.Module:
    """Return a model with `activations` and `readout`: a retrofit's decoder, or ours with retrieval off."""
    model = as_ours(model)
    return model if hasattr(model, "activations") else Decoder(model.decoder)


def check_takes_neighbours(model: nn.Module, neighbours) -> None:
    """Raise ValueError for neighbours that a decoder would not see."""
    if neighbours is not None and isinstance(model, Decoder):
        want = f"None for a decoder without retrieval ({type(model.decoder).__name__})"
        raise ValueError(f"neighbours: expected {want}; retrofit it, or use score_in_context")
