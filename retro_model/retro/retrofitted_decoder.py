"""A frozen decoder and the retrieval beside it, as one model: see `retrofit`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retro_model import checks, transfer
from retro_model.layers import ChunkedCrossAttention, NextTokenLoss, RMSNorm, initialise, next_token_loss

from .cache import ChunkCache, left_mask
from .config import RetroConfig
from .decoders import adapters, base_of, freeze, readout_of, warn_in_generate
from .encoder import NORM_EPS, NeighbourEncoder
from .inputs import check_inputs, row_starts
from .retrieval import Encoded, Retrieval

#: What the Hugging Face library does with its models, and with `RetrofitForCausalLM`.
THEIRS = ("generate", "save_pretrained", "push_to_hub")
ABROAD = "its Trainer, generate and save_pretrained take huggingface.RetrofitForCausalLM.from_decoder(decoder, ...)"


class RetrofittedDecoder(nn.Module):
    """A frozen causal decoder, with a chunked cross-attention after the self-attention of some of its blocks.

    What PEFT has added to the decoder trains on beside what is added here; so PEFT goes first,
    `retrofit(get_peft_model(...))`.

    For the Hugging Face library's Trainer, generate and save_pretrained there is `huggingface.RetrofitForCausalLM`,
    which holds one of these. `model.decoder` is the decoder as it was: its own `generate` knows of no neighbours, and
    warns.

    A block's self-attention update a becomes a + CCA(norm(x + a)), x the block's input. The encoder is conditioned on x
    + a of the first such block. The frozen decoder stays in evaluation mode: its dropout would only add noise to what
    it has learnt.

    Args:
        decoder: frozen in place; called as decoder(tokens, **options), giving logits or something with `.logits`.
        config: sizes of what is added.
        blocks, attention: see `retrofit`.
    """

    def __init__(
        self,
        decoder: nn.Module,
        config: RetroConfig,
        blocks: Sequence[nn.Module],
        attention: str,
        *,
        backend: str | None = None,
    ):
        super().__init__()
        where = next(decoder.parameters())
        where = {"device": where.device, "dtype": where.dtype}
        self.config = config
        self.decoder = decoder.eval()
        freeze(decoder)
        warn_in_generate(
            decoder,
            "decode huggingface.RetrofitForCausalLM.generate(..., retrieve=...) and retro_model.generate(model, ...)",
        )
        embedding = nn.Embedding(config.vocab_size, config.encoder_d_model, **where)
        self.encoder = NeighbourEncoder(config, embedding, backend=backend, **where)
        names = [str(layer) for layer in config.cca_layers]
        sizes = (config.d_model, config.num_heads, config.head_dim)
        options = {
            "chunk_len": config.chunk_len,
            "context_dim": config.encoder_d_model,
            "dropout": config.dropout,
            "backend": backend,
        }
        self.cca = nn.ModuleDict({name: ChunkedCrossAttention(*sizes, **options, **where) for name in names})
        self.cca_norm = nn.ModuleDict({name: RMSNorm(config.d_model, eps=NORM_EPS, **where) for name in names})
        for part in (self.cca, self.cca_norm):
            initialise(part, branches=2 * config.num_layers + len(names))
        self._pass: _Pass | None = None
        self._readout: str | None = readout_of(decoder)  # its name: the module itself belongs to the decoder
        for layer in config.cca_layers:
            block = blocks[layer - 1]
            block.register_forward_pre_hook(partial(self._keep_input, layer), with_kwargs=True)
            # a partial of a method, not a closure: a copy of the model has hooks of its own, and a model can be pickled
            getattr(block, attention).register_forward_hook(partial(self._cross_attend, layer))

    def train(self, mode: bool = True) -> RetrofittedDecoder:
        super().train(mode)
        self.decoder.eval()
        for adapter in adapters(self.decoder):
            adapter.train(mode)
        for module in self.decoder.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = mode  # its own flag, which checkpointing asks for, not its dropout's
        return self

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None) -> None:
        """Recompute the decoder's blocks in the backward pass, the neighbours' encoder with the first that retrieves.

        Raises: ValueError for use_reentrant=True, which would lose the encoder's gradient.
        """
        options = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        if options["use_reentrant"]:
            raise ValueError(
                "use_reentrant: expected False for a retrofitted decoder, whose blocks share encoded neighbours; got "
                "True"
            )
        base = base_of(self.decoder)
        enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
        enable({**options, "context_fn": self._checkpoint_contexts})
        self.train(self.training)

    def gradient_checkpointing_disable(self) -> None:
        """Keep all activations again."""
        base = base_of(self.decoder)
        (getattr(base, "activation_checkpointing_disable", None) or base.gradient_checkpointing_disable)()

    def _checkpoint_contexts(self):
        """A block that is computed again finds the retrieval of the pass it belongs to."""
        return nullcontext(), _Again(self, self._pass)

    def __getattr__(self, name: str):
        if name in THEIRS:
            raise AttributeError(f"{name}: a RetrofittedDecoder is no model of the Hugging Face library; {ABROAD}")
        return super().__getattr__(name)

    @property
    def accepts_loss_kwargs(self) -> bool:
        """What the Trainer asks of a model before it touches it.
        Raises: TypeError, for it trains `RetrofitForCausalLM`.
        """
        raise TypeError(f"model: a RetrofittedDecoder is no model of the Hugging Face library; {ABROAD}")

    def forward(
        self,
        tokens: Tensor | None = None,
        neighbours: Tensor | None = None,
        *,
        neighbour_mask: Tensor | None = None,
        cache: RetrofitCache | None = None,
        attention_mask: Tensor | None = None,
        loss_mask: Tensor | None = None,
        targets: Tensor | None = None,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **options,
    ) -> Tensor | NextTokenLoss:
        """Logits [B,N,V] of the token after each of `tokens` [B,N]; with `loss_mask`, what they make of those tokens.

        Args:
            neighbours: int64 [B,L,K,R], those of the L chunks that these tokens complete (N // M without a cache);
                None: none.
            neighbour_mask: bool [B,L,K] or [B,L,K,R], True = attend.
            cache: what earlier calls left; then the tokens are the next ones of its rows, and nothing is
                differentiable.
            attention_mask: [B,N], 1 where a row has a token, 0 on padding before or after; a row's positions and chunks
                are counted from its first token, and L is that of the longest row. With a cache, in its first call
                only.
            loss_mask: [B,N], True for tokens whose negative log-likelihood counts: see `Retro.forward`. The logits of
                all tokens are never in memory together, unless the decoder caps or shifts them.
            targets: int64 [B,N], in place of the tokens as what is to be predicted; needs `loss_mask`.
            input_ids, labels: refused: what the Trainer calls is a `RetrofitForCausalLM`.
            options: handed to the decoder.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        if tokens is None or input_ids is not None or labels is not None:
            raise TypeError(
                "tokens: expected int64 [B,N]; got input_ids or labels, as the Hugging Face library calls its models; "
                f"{ABROAD}"
            )
        if loss_mask is not None:
            return self._losses(
                tokens,
                neighbours,
                loss_mask,
                targets,
                neighbour_mask=neighbour_mask,
                attention_mask=attention_mask,
                **options,
            )
        for name in ("past_key_values", "inputs_embeds"):
            if options.get(name) is not None:
                raise ValueError(
                    f"{name}: not supported by a retrofitted decoder, whose chunks are counted from the first token; "
                    "use cache"
                )
        self._check_trainable()
        starts = row_starts("attention_mask", attention_mask, tokens)
        if cache is not None and starts is not None:
            cache.pad(starts)
        check_inputs(
            self.config, tokens, neighbours, neighbour_mask, self.encoder.embedding.weight.device, cache, starts
        )
        options |= self._padding(tokens, attention_mask, starts, cache)
        where = {"batch": tokens.shape[0], "device": tokens.device, "starts": starts, "cache": cache}
        if cache is None and (neighbours is None or not neighbours.shape[1]):
            out = self.decoder(tokens, **options)
        elif cache is None:
            out = self._run(
                Retrieval(self.encoder, tokens.shape[1], neighbours, neighbour_mask, **where), tokens, options
            )
        else:
            with torch.no_grad():
                retrieval = Retrieval(self.encoder, tokens.shape[1], neighbours, neighbour_mask, **where)
                out = self._run(retrieval, tokens, options | {"past_key_values": cache.decoder, "use_cache": True})
                cache.length += tokens.shape[1]
                cache.decoder = out.past_key_values
                retrieval.finish()
        return getattr(out, "logits", out)

    @staticmethod
    def _padding(tokens: Tensor, mask: Tensor | None, starts: list[int] | None, cache: RetrofitCache | None) -> dict:
        """What the decoder is told of padding: a mask of all columns, and positions from each row's first token."""
        starts, held = (starts, 0) if cache is None else (cache.starts, cache.length)
        if not starts or not any(starts):
            return {} if mask is None or cache is not None else {"attention_mask": mask}
        columns, device = held + tokens.shape[1], tokens.device
        if mask is None or held:
            mask = left_mask(starts, columns, device).long()
        positions = torch.arange(held, columns, device=device) - transfer.numbers(starts, device)[:, None]
        return {"attention_mask": mask, "position_ids": positions.clamp(min=0)}

    def _check_trainable(self) -> None:
        if (
            self.training
            and torch.is_grad_enabled()
            and not next(self.cca.parameters()).requires_grad
            and adapters(self)
        ):
            raise RuntimeError(
                "the chunked cross-attention is frozen beside adapters that train: PEFT around a retrofitted decoder "
                "freezes what was "
                "added; put PEFT into the decoder first, retrofit(get_peft_model(decoder, ...))"
            )

    def _run(self, retrieval: Retrieval, tokens: Tensor, options: dict):
        self._pass = _Pass(retrieval)
        try:
            return self.decoder(tokens, **options)
        finally:
            self._pass = None

    sums_losses = True  # takes `loss_mask`
    pads_prompts = True  # rows of different lengths go in together under `attention_mask`

    @property
    def decodes_ragged(self) -> bool:
        """Whether rows of different lengths share a cache: where the decoder takes a mask and positions."""
        return {"attention_mask", "position_ids"} <= inspect.signature(base_of(self.decoder).forward).parameters.keys()

    def last_logits(self, tokens: Tensor, neighbours: Tensor | None = None, **options) -> Tensor:
        """Logits [B,V] after the last token alone, where the decoder's readout is known. Arguments as in `forward`."""
        with self._last_only():
            return self(tokens, neighbours, **options)[:, -1]

    @contextmanager
    def _last_only(self):
        """Within, the readout makes logits of the last column alone; yields what it was given, [B,N,d] in a list."""
        inputs: list[Tensor] = []

        def narrow(readout: nn.Module, args: tuple) -> tuple[Tensor]:
            inputs.append(args[0])
            return (args[0][:, -1:],)

        handle = (
            None
            if self._readout is None
            else self.decoder.get_submodule(self._readout).register_forward_pre_hook(narrow)
        )
        try:
            yield inputs
        finally:
            if handle is not None:
                handle.remove()

    def _losses(
        self, tokens: Tensor, neighbours: Tensor | None, loss_mask: Tensor, targets: Tensor | None, **options
    ) -> NextTokenLoss:
        checks.shape("loss_mask", loss_mask, "B,N", {"B": tokens.shape[0], "N": tokens.shape[1]})
        targets = tokens if targets is None else targets
        with self._last_only() as inputs:
            logits = self(tokens, neighbours, **options)
        if inputs:
            return next_token_loss(inputs[0], self.decoder.get_submodule(self._readout).weight, targets, loss_mask)
        counted, logits = loss_mask[:, 1:], logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32))
        losses = (
            F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), reduction="none").view(counted.shape)
            * counted
        )
        return NextTokenLoss(losses.sum(), losses.detach())

    def make_cache(self, batch: int, capacity: int | None = None) -> RetrofitCache:
        """An empty cache for `batch` rows of at most `capacity` tokens; None: config.max_len."""
        return RetrofitCache(self.config, batch, capacity)

    def added_state_dict(self) -> dict[str, Tensor]:
        """The weights that were added, without the decoder's; `load_state_dict(..., strict=False)` takes them back."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("decoder.")}

    def _keep_input(self, layer: int, block: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._pass is not None:
            self._pass.inputs[layer] = args[0] if args else kwargs["hidden_states"]

    def _cross_attend(self, layer: int, attention: nn.Module, args: tuple, output):
        if self._pass is None:
            return None
        here, retrieval = self._pass, self._pass.retrieval
        update = output[0] if isinstance(output, tuple) else output
        hidden = here.inputs[layer] + update
        if layer == self.config.cca_layers[0]:
            here.encoded = retrieval.encode(hidden)  # again where checkpointing computes the block again
        if not retrieval.retrieves:
            return None
        name = str(layer)
        update = update + retrieval.cross_attend(self.cca[name], self.cca_norm[name](hidden), here.encoded, layer)
        return (update, *output[1:]) if isinstance(output, tuple) else update


class RetrofitCache(ChunkCache):
    """What a retrofitted decoder keeps while it decodes: `ChunkCache`, and the decoder's own cache. Rows are of one
    length, or padded on the left."""

    def __init__(self, config: RetroConfig, batch: int, capacity: int | None = None):
        super().__init__(config, batch, capacity)
        self.decoder = None  # whatever the decoder gives as past_key_values


class _Pass:
    """What one forward pass hands from hook to hook."""

    def __init__(self, retrieval: Retrieval):
        self.retrieval = retrieval
        self.inputs: dict[int, Tensor] = {}  # of the blocks that retrieve
        self.encoded: Encoded | None = None


class _Again:
    """The context in which a block of an earlier pass is computed again."""

    def __init__(self, model: RetrofittedDecoder, there: _Pass | None):
        self.model, self.there = model, there

    def __enter__(self):
        self.model._pass = self.there

    def __exit__(self, *_):
        self.model._pass = None
