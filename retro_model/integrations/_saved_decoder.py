"""The decoder's part of a saved retrofit: whether its origin holds its weights, and how they are written and loaded."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from retro_model.retrofit.decoders import adapters, base_of

#: Names of the modules that PEFT puts around a module of the decoder.
WRAPPED = (".base_layer.", ".original_module.")


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


def is_unchanged(decoder: nn.Module, origin: str | os.PathLike) -> bool:
    """Whether a folder holds the decoder's weights bit by bit, without adapters, which PEFT saves.

    A name on the hub means the copy in the library's cache, because saving must not wait for the network. The folder is
    loaded with the decoder's present configuration. Buffers that no checkpoint holds are not compared.
    """
    base = base_of(decoder)
    try:
        with torch.random.fork_rng(devices=[]):  # loading may draw numbers, which must not change the training
            there = load(_on_this_machine(origin, base), config_of(decoder), trust_remote_code=_is_remote(base))
    except Exception:  # the library's exceptions have many types
        return False
    here, theirs = {_plain(name): tensor for name, tensor in base.state_dict().items()}, there.state_dict()
    if type(there).__name__ != type(base).__name__ or not (theirs.keys() <= here.keys()):
        return False
    return all(here[name].dtype == t.dtype and torch.equal(here[name].cpu(), t.cpu()) for name, t in theirs.items())


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


def _is_remote(decoder: nn.Module) -> bool:
    """Whether the decoder's class comes from a repository whose code the caller has trusted already."""
    return type(decoder).__module__.startswith("transformers_modules.")
