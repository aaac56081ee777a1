"""Retrieval for a decoder that is already trained: three retrofits on one base.

base.py        the base classes: calls, padding, caches, losses and gradient checkpointing around a frozen decoder
decoders.py    the decoders of other libraries: their blocks, their residual form, their frozen weights
own.py         "own": the decoder reads and attends neighbours itself; own_attend.py has its attention,
               own_copy.py copies their tokens
new.py         "new": an encoder and chunked cross-attentions are added
rpt.py         retrieval from the decoder's own past
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from retro_model.layers import ChunkedCrossAttention
from retro_model.retro import Retro, RetroConfig

from .decoders import around, check_blocks, check_fixed, config_of, named_blocks
from .new import RetrofittedDecoder
from .own import OwnAttention, retrofit_own
from .rpt import RetrofittedRPT, retrofit_rpt

__all__ = ["OwnAttention", "RetrofittedDecoder", "RetrofittedRPT", "retrofit", "retrofit_rpt"]

#: Fields that the decoder fixes; ours also has its heads, another's chunked cross-attention may have more or fewer.
FIXED = ("vocab_size", "d_model", "d_ff", "num_layers")
FIXED_IN_OURS = (*FIXED, "num_heads", "head_dim")
#: Reader of the neighbours: RETRO's layers, which are added, or the decoder itself.
NEIGHBOURS = ("new", "own")


def retrofit(
    decoder: nn.Module,
    neighbours: str = "new",
    *,
    blocks: Sequence[nn.Module] | None = None,
    attention: str | None = None,
    cca_output: str = "zero",
    backend: str | None = None,
    **changes,
) -> nn.Module:
    """Make a model that retrieves around a decoder, which is frozen in place.

    Example:
        model = retrofit(GPT2LMHeadModel.from_pretrained("gpt2"), cca_layers=(6, 9, 12))
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-4)
        logits = model(tokens, neighbours, neighbour_mask=mask)
        logits = model(tokens)  # retrieval off: the decoder's own outputs, to the bit

    Args:
        decoder: a `Retro` without retrieval, or a causal decoder of pre-norm blocks that add their attention's output
            to their input (Hugging Face's GPT-2, Llama, Mistral, Qwen and their kin), which is tried out; with or
            without PEFT adapters, which go on training.
        neighbours: "new": RETRO's layers are added, an encoder of neighbours and chunked cross-attentions, which know
            nothing before they are trained. "own": the decoder reads and attends neighbours by itself, see
            `OwnAttention`; its changes are cca_layers (None: all), chunk_len=32, neighbour_len=64, bias=-1.0 (the start
            of every head's), sink_token (the token before each neighbour; None: the decoder's bos_token_id, else 0)
            rank=0 (of low-rank maps a head), prefix=() (tokens in front of every text and neighbour, the first of them
            a sink: text of the library), copying=False (whether tokens of neighbours are copied, by numbers that have
            to be fitted) and second_look=False (whether complete chunks are read again with their own neighbours).
            All arguments below but `backend` are of "new".
        blocks: the decoder's blocks, first to last; None: found where the Hugging Face library keeps them.
        attention: the name of a block's self-attention.
        cca_output: "zero": the output projection of every chunked cross-attention starts at zero, so that training
            begins at the decoder's own likelihood; "fresh": at random like all else that is added, as in the paper.
        backend: of `retro_kernels`; None: the fastest that serves a call.
        changes: fields of `RetroConfig`: cca_layers, chunk_len, neighbour_len (default 2 chunk_len), the encoder's
            sizes; share_embeddings where the decoder is a `Retro`; num_heads and head_dim of the cross-attention where
            it is not.

    Returns:
        A `Retro` where the decoder is one, with shared weights; else a `RetrofittedDecoder` or an `OwnAttention`.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: Borgeaud et al., arXiv 2112.04426, section 4.2 and appendix C ("Retrofitting").
    """
    if neighbours not in NEIGHBOURS:
        raise ValueError(f"neighbours: expected 'new' or 'own'; got {neighbours!r}")
    if neighbours == "own" or isinstance(decoder, Retro):
        kind = "neighbours='own'" if neighbours == "own" else "a Retro"
        for name, value in (("blocks", blocks), ("attention", attention)):
            if value is not None:
                raise ValueError(f"{name}: expected None for {kind}, whose blocks are known; got a value")
    if neighbours == "own":
        return retrofit_own(decoder, backend=backend, **changes)
    if cca_output not in ("zero", "fresh"):
        raise ValueError(f"cca_output: expected 'zero' or 'fresh'; got {cca_output!r}")
    if isinstance(decoder, Retro):
        model = _retrofit_retro(decoder, backend, _changed(decoder.config, changes, FIXED_IN_OURS))
    else:
        model = _retrofit_other(decoder, blocks, attention, backend, changes)
    if cca_output == "zero":
        for module in model.modules():
            if isinstance(module, ChunkedCrossAttention):
                nn.init.zeros_(module.output.weight)
    return model


def _retrofit_other(decoder: nn.Module, blocks, attention, backend: str | None, changes: dict) -> RetrofittedDecoder:
    blocks, attention = named_blocks(decoder, blocks, attention)
    config = _changed(config_of(decoder, len(blocks), changes.get("head_dim")), changes, FIXED)
    if config.share_embeddings:
        wanted = "False for a decoder that is no Retro, whose embeddings may be scaled or mixed"
        raise ValueError(f"share_embeddings: expected {wanted}; got True")
    decoder.eval()
    check_blocks(decoder, [blocks[layer - 1] for layer in config.cca_layers], attention)
    return RetrofittedDecoder(decoder, config, blocks, attention, backend=backend)


def _changed(config: RetroConfig, changes: dict, fixed: Sequence[str]) -> RetroConfig:
    """Return the decoder's sizes with `changes`. Raises: ValueError for a change of a field in `fixed`."""
    check_fixed(changes, {name: getattr(config, name) for name in fixed})
    if "chunk_len" in changes:
        changes = {"neighbour_len": 2 * changes["chunk_len"], **changes}
    config = config.replace(**{"cca_layers": None, **changes})
    if not config.retrieves:
        raise ValueError(f"cca_layers: expected at least one layer to retrofit (from 1 to {config.num_layers}); got ()")
    return config


def _retrofit_retro(decoder: Retro, backend: str | None, config: RetroConfig) -> Retro:
    if decoder.config.retrieves:
        got = f"cca_layers={decoder.config.cca_layers}"
        raise ValueError(f"decoder: expected a Retro without retrieval (cca_layers=()); got {got}")
    return around(decoder, Retro, config, backend)
