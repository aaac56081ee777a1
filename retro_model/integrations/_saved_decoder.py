"""The decoder's part of a saved retrofit: find the tensors that its folder lacks, and put them back."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from retro_model.retrofit.decoders import adapters, base_of

#: Names of the modules that PEFT puts around a module of the decoder.
WRAPPED = (".base_layer.", ".original_module.")


class Unloadable(ValueError):
    """Raised for a folder from which a decoder cannot be loaded again. The message names the decoder's first fault."""


def load(folder: str | os.PathLike, config: dict, **options) -> PreTrainedModel:
    """Load a decoder's weights into a model of this configuration.

    options: keywords of the library's `from_pretrained`.
    """
    fields = dict(config)
    made = AutoConfig.for_model(fields.pop("model_type"), **fields)
    return AutoModelForCausalLM.from_pretrained(folder, **({"config": made, "dtype": made.dtype or "auto"} | options))


def config_of(decoder: nn.Module) -> dict:
    """Return the configuration that the decoder has now, with the type that its weights have now."""
    base = base_of(decoder)
    return base.config.to_dict() | {"dtype": str(base.dtype).removeprefix("torch.")}


def save(decoder: nn.Module, folder: str | os.PathLike, **options) -> None:
    """Write the decoder without its adapters, with the configuration that it has now.

    options: keywords of the library's `save_pretrained`.
    """
    base, state = base_of(decoder), None
    if adapters(decoder):
        with torch.device("meta"):
            known = type(base)(base.config).state_dict().keys()
        state = {_plain(name): tensor for name, tensor in base.state_dict().items() if _plain(name) in known}
    base.save_pretrained(folder, state_dict=state, **options)


def differing(decoder: nn.Module, folder: str | os.PathLike) -> dict[str, Tensor]:
    """Return the parameters and buffers of the decoder that differ from the tensors in a folder.

    A name on the hub means the copy in the library's cache, because saving must not wait for the network. The folder is
    loaded with the decoder's present configuration, and tensors are compared bit by bit. Buffers that no
    checkpoint holds are compared too. Adapters are not compared, because PEFT saves them.

    Raises: Unloadable, if the library cannot load the folder, or loads a model with other tensors.
    """
    base, tuned = base_of(decoder), bool(adapters(decoder))
    try:
        with torch.random.fork_rng(devices=[]):  # loading may draw numbers, which must not change the training
            there = load(_on_this_machine(folder, base), config_of(decoder), trust_remote_code=_is_remote(base))
    except Exception as error:  # the library's exceptions have many types
        raise Unloadable(f"expected a decoder that the library loads again; got {error}") from error
    if type(there).__name__ != type(base).__name__:
        expected = f"expected a {type(there).__name__}, which AutoModelForCausalLM loads"
        raise Unloadable(f"{expected}; got a {type(base).__name__}")
    here, theirs = {_plain(name): tensor for name, tensor in tensors(base)}, dict(tensors(there))
    for name in sorted(theirs.keys() | (set() if tuned else here.keys())):
        shapes = [list(of[name].shape) if name in of else "none" for of in (theirs, here)]
        if shapes[0] != shapes[1]:
            expected = f"expected the tensors that its configuration describes, {name} of shape {shapes[0]}"
            raise Unloadable(f"{expected}; got {shapes[1]}")
    return {name: here[name] for name, tensor in theirs.items() if not _same(here[name], tensor)}


def put(decoder: PreTrainedModel, changed: dict[str, Tensor]) -> None:
    """Replace parameters and buffers. Raises: ValueError for a name that the decoder lacks, and for another shape."""
    known = dict(tensors(decoder))
    for name, tensor in changed.items():
        if name not in known or known[name].shape != tensor.shape:
            expected = f"{name} {list(known[name].shape)}" if name in known else "tensors that the decoder has"
            raise ValueError(f"folder: expected {expected}; got {name} {list(tensor.shape)}")
        owner, _, leaf = name.rpartition(".")
        tensor = tensor.to(known[name].device)
        is_parameter = isinstance(known[name], nn.Parameter)
        setattr(decoder.get_submodule(owner), leaf, nn.Parameter(tensor, False) if is_parameter else tensor)


def tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter and each buffer, under each of its names."""
    yield from itertools.chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    )


def _on_this_machine(name: str | os.PathLike, decoder: PreTrainedModel) -> Path:
    """Return the folder of this name, or the cached copy of the hub's files from which the decoder was loaded."""
    if Path(name).is_dir():
        return Path(name)
    revision = getattr(decoder.config, "_commit_hash", None)
    file = try_to_load_from_cache(str(name), "config.json", revision=revision)
    if not isinstance(file, str):
        raise FileNotFoundError(f"{name} is neither a folder nor in the cache of the library")
    return Path(file).parent


def _plain(name: str) -> str:
    for part in WRAPPED:
        name = name.replace(part, ".")
    return name


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _is_remote(decoder: nn.Module) -> bool:
    """Whether the decoder's class comes from a repository whose code the caller has trusted already."""
    return type(decoder).__module__.startswith("transformers_modules.")
