"""Decoders of other libraries that can be retrofitted: their blocks, their residual form, their frozen weights."""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from retro_model.retro.config import RetroConfig

#: Attribute paths of the blocks in Hugging Face decoders, and a block's name for its attention.
PLACES = (("transformer.h", "attn"), ("model.layers", "self_attn"))
#: Names that decoders and their blocks give the argument with the decoder's own cache; transformers 5.24 renamed a
#: model's from "past_key_values" to "cache".
CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
#: Largest relative difference of one block's output computed in two ways, by type: rounding of a few products.
SAME = {torch.float64: 1e-6, torch.float32: 1e-3}
SAME_IN_HALF = 5e-2


def base_of(decoder: nn.Module) -> nn.Module:
    """Return the decoder within a PEFT model; any other model itself."""
    return decoder.get_base_model() if hasattr(decoder, "get_base_model") else decoder


def cache_name(decoder: nn.Module) -> str:
    """Name of the argument that takes the decoder's own cache, and of the output that returns it."""
    names = inspect.signature(base_of(decoder).forward).parameters
    return next((name for name in CACHES if name in names), "past_key_values")


def adapters(module: nn.Module) -> list[nn.Module]:
    """Return the layers that PEFT has put into a model (LoRA and its kin)."""
    return [m for m in module.modules() if any(c.__name__ == "BaseTunerLayer" for c in type(m).__mro__)]


def named_blocks(
    decoder: nn.Module, blocks: Sequence[nn.Module] | None, attention: str | None
) -> tuple[Sequence[nn.Module], str]:
    """Return the blocks given, or a Hugging Face decoder's, and the name of a block's self-attention.

    Raises: ValueError for a block without a self-attention of that name; TypeError for another library's decoder.
    """
    if blocks is not None:
        if attention is None or not all(isinstance(getattr(block, attention, None), nn.Module) for block in blocks):
            raise ValueError(f"attention: expected the name of every block's self-attention module; got {attention!r}")
        return blocks, attention
    for path, attention in PLACES:
        try:
            blocks = operator.attrgetter(path)(base_of(decoder))
        except AttributeError:
            continue
        if isinstance(blocks, nn.ModuleList) and len(blocks) and hasattr(blocks[0], attention):
            return blocks, attention
    known = ", ".join(f"{path}[i].{attention}" for path, attention in PLACES)
    wanted = f"a Retro, or a decoder with {known}, or `blocks` and `attention`"
    raise TypeError(f"decoder: expected {wanted}; got {type(decoder).__name__}")


def check_fixed(changes: dict, fixed: dict) -> None:
    """Raise ValueError for a change of a size that the decoder fixes."""
    for name, value in fixed.items():
        if name in changes and changes[name] != value:
            raise ValueError(f"{name}: expected the decoder's {value}; got {changes[name]!r}")


def around(decoder: nn.Module, kind: type[nn.Module], config, backend: str | None) -> nn.Module:
    """Return a model of a `kind` whose parameters are the decoder's, frozen, where the decoder has them."""
    where = next(decoder.parameters())
    model = kind(config, backend=backend, device=where.device, dtype=where.dtype)
    for name, trained in list(decoder.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, trained.requires_grad_(False))
    return model


def config_of(decoder: nn.Module, num_layers: int, head_dim: int | None = None) -> RetroConfig:
    """Our sizes for a Hugging Face decoder. head_dim: of chunked cross-attention; None: the decoder's."""
    theirs = getattr(base_of(decoder), "config", None)
    for name in ("vocab_size", "hidden_size", "num_attention_heads"):
        if not isinstance(getattr(theirs, name, None), int):
            raise TypeError(f"decoder: expected a model whose config has {name}; got {type(decoder).__name__}")
    width, heads = theirs.hidden_size, theirs.num_attention_heads
    head_dim = head_dim or getattr(theirs, "head_dim", None) or width // heads
    longest = getattr(theirs, "max_position_embeddings", None) or RetroConfig.max_len
    return RetroConfig(theirs.vocab_size, width, 4 * width, heads, head_dim, num_layers, max_len=longest)


@torch.no_grad()
def readout_of(decoder: nn.Module) -> str | None:
    """Try by four tokens which linear map's plain output is the logits (no bias, no cap); return its name, or None."""
    base, where = base_of(decoder), next(decoder.parameters()).device
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    if type(head) is not nn.Linear or head.bias is not None or where.type == "meta":
        return None
    inputs: list[Tensor] = []
    with head.register_forward_pre_hook(lambda module, args: inputs.append(args[0])):
        out = decoder(torch.arange(4, device=where)[None] % base.config.vocab_size)
    logits = getattr(out, "logits", out)
    if len(inputs) != 1 or not torch.equal(logits, head(inputs[0])):
        return None
    return next(name for name, module in decoder.named_modules() if module is head)


@contextlib.contextmanager
def last_only(decoder: nn.Module, readout: str | None) -> Iterator[list[Tensor]]:
    """Context manager: the named readout computes the last column only. Yields a list that receives its input [B,N,d].

    readout: see `readout_of`; None: nothing changes.
    """
    inputs: list[Tensor] = []

    def narrow(module: nn.Module, args: tuple) -> tuple[Tensor]:
        inputs.append(args[0])
        return (args[0][:, -1:],)

    head = None if readout is None else decoder.get_submodule(readout)
    with contextlib.nullcontext() if head is None else head.register_forward_pre_hook(narrow):
        yield inputs


@torch.no_grad()
def check_blocks(decoder: nn.Module, blocks: Sequence[nn.Module], attention: str) -> None:
    """ValueError unless each block adds its attention's output to its input and goes on from the sum alone. Such a
    block, and no other, gives the same where that output is moved into its input. One pass of four tokens tries it; on
    a meta device nothing is tried.

    Blocks that norm the output before they add it (Gemma 2, OLMo 2) or feed their feed-forward from the input (Phi,
    GPT-J) do not.
    """
    where = next(decoder.parameters()).device
    if where.type == "meta":
        return
    calls: dict[int, tuple] = {}
    keep = lambda module, args, kwargs: calls.update({id(module): (args, kwargs)})  # noqa: E731
    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block.register_forward_pre_hook(keep, with_kwargs=True))
        decoder(torch.arange(4, device=where)[None] % base_of(decoder).config.vocab_size)
    for block in blocks:
        error = _moved_difference(block, getattr(block, attention), *calls[id(block)])
        if not error < SAME.get(next(block.parameters()).dtype, SAME_IN_HALF):
            wanted = "blocks that add their attention's output to their input and go on from the sum"
            why = f"whose output differs by {error:.2g} (relative) where that output is moved into the input"
            raise ValueError(f"decoder: expected {wanted}; got {type(block).__name__}, {why}")


def _moved_difference(block: nn.Module, attention: nn.Module, args: tuple, kwargs: dict) -> float:
    """Return the difference of a block's outputs for (x, attention's output u) and (x + u, 0), over its update."""
    kwargs = {name: None if name in CACHES else value for name, value in kwargs.items()}
    x = args[0] if args else kwargs["hidden_states"]
    # as large as x, unlike most real ones
    u = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x) * x.std()

    def output(hidden: Tensor, update: Tensor) -> Tensor:
        replaced = lambda *call: (update, *call[-1][1:]) if isinstance(call[-1], tuple) else update  # noqa: E731
        with attention.register_forward_hook(replaced):
            out = block(hidden, *args[1:], **kwargs) if args else block(**kwargs | {"hidden_states": hidden})
        return (out[0] if isinstance(out, tuple) else out).double()

    added = output(x, u)
    return float((added - output(x + u, torch.zeros_like(u))).norm() / (added - x).norm())
