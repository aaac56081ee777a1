"""Base classes of the retrofits: a frozen decoder of another library inside a model that retrieves."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retro_model.base import checks, transfer
from retro_model.layers import NextTokenLoss, next_token_loss
from retro_model.retro.cache import ChunkCache, left_mask
from retro_model.retro.inputs import Retrieved, check_inputs, check_positions, row_starts

from .decoders import CACHES, adapters, base_of, cache_name, last_only, readout_of

HALF = (torch.float16, torch.bfloat16)
#: Keywords of decoders that no retrofit serves, and the reason.
REFUSED = {
    **dict.fromkeys((*CACHES, "inputs_embeds"), "whose chunks are counted from the first token"),
    **dict.fromkeys(("output_hidden_states", "output_attentions", "output_router_logits"), "which returns logits"),
    "labels": "which returns logits; the Trainer takes huggingface.RetrofitForCausalLM.from_decoder(decoder, ...)",
}


class Frozen(nn.Module):
    """Base class of the models that add weights to a trained decoder, which they freeze in place.

    Adapters of PEFT in the decoder continue to train next to the added weights. The decoder itself stays in evaluation
    mode, because its dropout would only add noise to frozen weights.

    Args:
        config: sizes of the added layers.
    """

    def __init__(self, decoder: nn.Module, config):
        super().__init__()
        self.config = config
        self.decoder = decoder.eval()
        self._cache_name = cache_name(decoder)
        self._keywords = frozenset(inspect.signature(base_of(decoder).forward).parameters)
        if not adapters(decoder):  # where there are some, PEFT has frozen the rest
            decoder.requires_grad_(False)

    def train(self, mode: bool = True):
        super().train(mode)
        self.decoder.eval()
        for adapter in adapters(self.decoder):
            adapter.train(mode)
        for module in self.decoder.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = mode  # its own flag, which checkpointing asks for, not its dropout's
        return self

    _running: Any = None  # state of the forward pass that runs, for the hooks; `inputs`: of the blocks that retrieve

    @contextlib.contextmanager
    def _during(self, state) -> Iterator[None]:
        """Context manager: `state` is `_running`."""
        self._running = state
        try:
            yield
        finally:
            self._running = None

    def _hook(self, blocks: Sequence[nn.Module], attention: str) -> None:
        """Let each block of config.cca_layers add `_retrieved` to the update of its self-attention, which it names."""
        for layer in self.config.cca_layers:
            block = blocks[layer - 1]
            # partials of methods, not closures: a copy of the model has hooks of its own, and a model can be pickled
            block.register_forward_pre_hook(partial(self._keep_input, layer), with_kwargs=True)
            getattr(block, attention).register_forward_hook(partial(self._add, layer))

    def _keep_input(self, layer: int, block: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._running is not None:
            self._running.inputs[layer] = args[0] if args else kwargs["hidden_states"]

    def _add(self, layer: int, attention: nn.Module, args: tuple, output):
        if self._running is None:
            return None
        update = output[0] if isinstance(output, tuple) else output
        added = self._retrieved(layer, self._running.inputs[layer] + update)
        if added is None:
            return None
        update = update + added.to(update.dtype)
        return (update, *output[1:]) if isinstance(output, tuple) else update

    def _retrieved(self, layer: int, hidden: Tensor) -> Tensor | None:
        """Return chunked cross-attention's update of a block's input plus its self-attention's update; None: none."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Device of the decoder."""
        return next(self.decoder.parameters()).device

    def decoder_options(self, options: dict, cached: bool = False) -> dict:
        """Return the keywords of a call that are handed to the decoder.

        cached: whether the call has a cache of `make_cache`.
        Raises: ValueError for keywords of the decoder that a retrofit does not serve. TypeError for keywords that the
            decoder's forward does not name, because the decoder would ignore them.
        """
        handed_on = {}
        for name, value in options.items():
            if name in REFUSED:
                if value is not None and value is not False:
                    instead = "; use the cache of make_cache" if name in CACHES else ""
                    raise ValueError(f"{name}: not supported by a retrofitted decoder, {REFUSED[name]}{instead}")
            elif name not in self._keywords:
                forward = f"{type(base_of(self.decoder)).__name__}.forward"
                raise TypeError(f"{name}: expected a keyword of the model or of {forward}; got another")
            else:
                handed_on[name] = value
        use_cache = handed_on.get("use_cache")
        if use_cache is not None and bool(use_cache) != cached:
            wanted = "None or True with a cache" if cached else "None or False without a cache of make_cache"
            raise ValueError(f"use_cache: expected {wanted}; got {use_cache}")
        return handed_on

    def added_parameters(self) -> list[nn.Parameter]:
        """Return the weights that were added, without the decoder's."""
        return [p for name, p in self.named_parameters() if not name.startswith("decoder.")]

    def added_state_dict(self) -> dict[str, Tensor]:
        """Return the added weights by name, without the decoder's; `load_state_dict(..., strict=False)` loads them."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("decoder.")}


class FrozenDecoder(Frozen):
    """Base class of the models that `retrofit` makes of another library's decoder.

    A subclass retrieves in `_with_neighbours`.

    PEFT goes first, `retrofit(get_peft_model(...))`. Added parameters are at least float32, whatever the decoder's
    type: small steps of an optimiser vanish in half precision.

    `model.decoder` is the decoder as it was: its own `generate` knows of no neighbours. For the Hugging Face library's
    Trainer, generate and save_pretrained there is `huggingface.RetrofitForCausalLM`, which holds one.

    Args:
        decoder: frozen in place; called as decoder(tokens, **options), giving logits or something with `.logits`.
        config: sizes of the added modules.
    """

    always_attends = False  # whether `_with_neighbours` also serves calls without neighbours
    changes_logits = False  # whether the logits are more than the readout's, so that the loss needs all of them
    sums_losses = True  # takes `loss_mask`
    pads_prompts = "attention_mask"  # rows of different lengths enter together under this mask

    def __init__(self, decoder: nn.Module, config):
        super().__init__(decoder, config)
        weight = next(decoder.parameters())
        #: device and type of the added weights
        self.where = {"device": weight.device, "dtype": torch.float32 if weight.dtype in HALF else weight.dtype}
        self._readout: str | None = readout_of(decoder)  # its name: the module itself belongs to the decoder

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None) -> None:
        """Recompute the decoder's blocks, with the added layers, in the backward pass.

        Raises: ValueError for use_reentrant=True, which would lose the gradient of the added weights.
        """
        options = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        if options["use_reentrant"]:
            why = "whose blocks share encoded neighbours"
            raise ValueError(f"use_reentrant: expected False for a retrofitted decoder, {why}; got True")
        base = base_of(self.decoder)
        enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
        enable(options | self._checkpointing_options())
        self.train(self.training)

    def _checkpointing_options(self) -> dict:
        return {}

    def gradient_checkpointing_disable(self) -> None:
        """Keep all activations again."""
        base = base_of(self.decoder)
        (getattr(base, "activation_checkpointing_disable", None) or base.gradient_checkpointing_disable)()

    def forward(
        self,
        tokens: Tensor,
        neighbours: Tensor | None = None,
        *,
        neighbour_mask: Tensor | None = None,
        cache: RetrofitCache | None = None,
        attention_mask: Tensor | None = None,
        loss_mask: Tensor | None = None,
        targets: Tensor | None = None,
        **options,
    ) -> Tensor | NextTokenLoss:
        """Return logits [B,N,V] of the token after each of `tokens` [B,N], or the loss if there is a `loss_mask`.

        Args:
            neighbours: int64 [B,L,K,R], the neighbours of the L chunks that these tokens complete (N // M without a
                cache); None for no retrieval.
            neighbour_mask: bool [B,L,K] or [B,L,K,R], True = attend.
            cache: what earlier calls left; then the tokens are the next ones of its rows, and nothing is
                differentiable.
            attention_mask: [B,N], 1 where a row has a token, 0 on padding before or after; a row's positions and chunks
                are counted from its first token, and L is counted in the longest row. Only the first call with a cache
                may have padding, before the tokens.
            loss_mask: [B,N], True for tokens whose negative log-likelihood counts: see `Retro.forward`. The logits of
                all tokens are never in memory together, unless the decoder caps or shifts them.
            targets: int64 [B,N], in place of the tokens as what is to be predicted; needs `loss_mask`.
            options: keywords of the decoder's forward, which are handed to it. position_ids [B or 1, N] must increase
                by one from token to token if there are neighbours or a cache, because packed rows would share
                chunks. past_key_values, inputs_embeds, use_cache=True without a cache, outputs besides the logits and
                keywords that the decoder does not name are refused.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        if loss_mask is not None:
            options["neighbour_mask"] = neighbour_mask
            return self._losses(tokens, neighbours, loss_mask, targets, attention_mask=attention_mask, **options)
        options = self.decoder_options(options, cache is not None)
        self._check_trainable()
        starts = row_starts("attention_mask", attention_mask, tokens)
        if cache is not None:
            self.check_cache(cache, attention_mask)
            if starts is not None:
                cache.pad(starts)
        retrieved = Retrieved(neighbours, neighbour_mask)
        if cache is None:
            retrieved = self._cut(tokens, starts, retrieved)
        check_inputs(self.config, tokens, retrieved, self.device, cache, starts)
        positions = options.get("position_ids")
        if positions is not None and (self.always_attends or retrieved.neighbours is not None or cache is not None):
            check_positions(positions, tokens, attention_mask)
        options = self._padding(tokens, attention_mask, starts, cache) | options
        if retrieved.neighbours is not None and not retrieved.neighbours.shape[1]:
            retrieved = Retrieved()
        if cache is not None:
            options |= {self._cache_name: cache.decoder, "use_cache": True}
            with torch.no_grad():
                out = self._with_neighbours(tokens, retrieved, starts, cache, options)
            cache.length += tokens.shape[1]
            cache.decoder = getattr(out, self._cache_name)
        elif retrieved.neighbours is None and not self.always_attends:
            out = self.decoder(tokens, **options)
        else:
            out = self._with_neighbours(tokens, retrieved, starts, None, options)
        return getattr(out, "logits", out)

    def _cut(self, tokens: Tensor, starts: list[int] | None, retrieved: Retrieved) -> Retrieved:
        """Return the part for the complete chunks, if the call may give neighbours of more chunks."""
        return retrieved

    def _with_neighbours(self, tokens: Tensor, retrieved: Retrieved, starts: list[int] | None, cache, options: dict):
        """Return the decoder's output, and update our part of the cache. retrieved: empty if no chunk completes."""
        raise NotImplementedError

    @staticmethod
    def _padding(tokens: Tensor, mask: Tensor | None, starts: list[int] | None, cache: RetrofitCache | None) -> dict:
        """Return the decoder's arguments for padding: a mask of all columns, positions from each row's first token."""
        starts, held = (starts, 0) if cache is None else (cache.starts, cache.length)
        if not starts or not any(starts):
            return {} if mask is None or cache is not None else {"attention_mask": mask}
        columns, device = held + tokens.shape[1], tokens.device
        if mask is None or held:
            mask = left_mask(starts, columns, device).long()
        positions = torch.arange(held, columns, device=device) - transfer.numbers(starts, device)[:, None]
        return {"attention_mask": mask, "position_ids": positions.clamp(min=0)}

    def check_cache(self, cache: RetrofitCache, mask: Tensor | None) -> None:
        """Raise ValueError unless the decoder's own cache has our length and the new columns end with tokens."""
        checks.own_cache(cache, self.config)
        count = getattr(cache.decoder, "get_seq_length", lambda: cache.length)()
        if count != cache.length:
            wanted = f"the {cache.length} tokens that this model has read into it"
            raise ValueError(f"cache: expected {wanted}; got {count} tokens, whose neighbours are unknown")
        if mask is not None and not mask[:, -1].all():
            raise ValueError(
                "attention_mask: expected padding before a row's tokens alone with a cache; got some after"
            )

    def _check_trainable(self) -> None:
        frozen = not any(p.requires_grad for p in self.added_parameters())
        if self.training and torch.is_grad_enabled() and frozen and adapters(self):
            raise RuntimeError(
                "the weights that were added are frozen beside adapters that train: PEFT around a retrofitted decoder "
                "freezes them; put PEFT into the decoder first, retrofit(get_peft_model(decoder, ...))"
            )

    @property
    def decodes_ragged(self) -> bool:
        """Whether rows of different lengths may share a cache: the decoder must take a mask and positions."""
        return {"attention_mask", "position_ids"} <= inspect.signature(base_of(self.decoder).forward).parameters.keys()

    def last_logits(self, tokens: Tensor, neighbours: Tensor | None = None, **options) -> Tensor:
        """Logits [B,V] after the last token alone, where the decoder's readout is known. Arguments as in `forward`."""
        with last_only(self.decoder, self._readout):
            return self(tokens, neighbours, **options)[:, -1]

    def _losses(self, tokens: Tensor, neighbours, loss_mask: Tensor, targets, **options) -> NextTokenLoss:
        if options.get("logits_to_keep"):
            raise ValueError("logits_to_keep: expected None with loss_mask, which needs all logits; got a value")
        checks.shape("loss_mask", loss_mask, "B,N", {"B": tokens.shape[0], "N": tokens.shape[1]})
        targets = tokens if targets is None else targets
        with last_only(self.decoder, None if self.changes_logits else self._readout) as inputs:
            logits = self(tokens, neighbours, **options)
        if inputs:
            return next_token_loss(inputs[0], self.decoder.get_submodule(self._readout).weight, targets, loss_mask)
        counted, logits = loss_mask[:, 1:], logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), reduction="none")
        losses = losses.view(counted.shape) * counted
        return NextTokenLoss(losses.sum(), losses.detach())

    def make_cache(self, batch: int, capacity: int | None = None) -> RetrofitCache:
        """Make an empty cache for `batch` rows of at most `capacity` tokens; None: config.max_len."""
        return RetrofitCache(self.config, batch, capacity)


class RetrofitCache(ChunkCache):
    """Cache of a retrofitted decoder: a `ChunkCache`, and the decoder's own cache.

    Rows are of one length, or padded on the left.
    """

    def __init__(self, config, batch: int, capacity: int | None = None):
        super().__init__(config, batch, capacity)
        self.decoder = None  # whatever the decoder returns as its cache
        self.states: Tensor | None = None  # [B,K,F], of each row's last complete chunk, see `OwnAttention`
        self.copied = None  # entries of all neighbours so far, see `own_copy`
