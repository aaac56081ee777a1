"""Presets, the parameter counts of Table 2, and refused configurations."""

import dataclasses
import json
import re

import pytest
import torch
from torch import nn

from retro_model.retro import Retro
from retro_model.retro.config import PRESETS, RetroConfig
from tests.model import tiny
from tests.refusals import refused

#: millions of weights, recomputed from Table 2's sizes by hand: RETRO, baseline. The table itself rounds them.
TABLE_2 = {
    "172m": (172.491, 132.121),
    "425m": (425.460, 368.050),
    "1.5b": (1451.360, 1308.623),
    "7.5b": (7531.528, 6979.322),
}


def counted(model: Retro) -> int:
    """Count the weights of attention, feed-forward and relative projections of the module."""
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m is not model.readout)


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_table(name):
    config = RetroConfig.preset(name)
    retro, baseline = TABLE_2[name]
    assert config.vocab_size == 128_000
    assert round(config.num_parameters() / 1e6, 3) == retro
    assert round(config.baseline().num_parameters() / 1e6, 3) == baseline


CONFIGS = [RetroConfig.preset(name) for name in PRESETS] + [tiny.config(), tiny.config(cca_layers=(1,))]
CONFIGS += [tiny.config(encoder_layers=1), *(tiny.config(encoder_cross_layers=layers) for layers in ((), (1, 2)))]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config.num_parameters()))
def test_the_module_has_as_many_weights_as_its_configuration_says(config):
    for variant in (config, config.baseline()):
        model = Retro(variant, device="meta")
        assert counted(model) == variant.num_parameters()
        assert model.embedding.weight.shape == (config.vocab_size, config.d_model)


def test_cca_layers_of_the_presets():
    assert RetroConfig.preset("172m").cca_layers == (6, 9, 12)
    assert RetroConfig.preset("1.5b").cca_layers == (6, 9, 12, 15, 18, 21, 24)
    assert RetroConfig.preset("7.5b").cca_layers == (6, 9, 12, 15, 18, 21, 24, 27, 30)
    assert not RetroConfig.preset("172m").baseline().retrieves


def test_dict_round_trip_through_json():
    config = tiny.config(dropout=0.25, encoder_cross_layers=(1, 2))
    assert RetroConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny.config().d_model = 3


LAYERS = "cca_layers: expected ascending layers from 1 to num_layers=5; got "
REFUSED = {
    ValueError: {
        "d_model: expected an int >= 1; got 0": {"d_model": 0},
        "d_model: expected an even width": {"d_model": 25},
        "encoder_d_model: expected an even width": {"encoder_d_model": 21},
        "head_dim: expected a multiple of 8 from 16 to 256; got 12": {"head_dim": 12},
        "encoder_head_dim: expected a multiple of 8": {"encoder_head_dim": 264},
        **{LAYERS + re.escape(str(value)): {"cca_layers": value} for value in ((2, 6), (0, 2), (4, 2), (2, 2))},
        "encoder_cross_layers: expected ascending layers from 1 to encoder_layers=2": {"encoder_cross_layers": (3,)},
        "share_embeddings: expected encoder_d_model == d_model = 24": {"share_embeddings": True},
        r"dropout: expected a probability in \[0, 1\)": {"dropout": 1.0},
    },
    TypeError: {
        "num_layers: expected an int; got float": {"num_layers": 2.0},
        "chunk_len: expected an int; got bool": {"chunk_len": True},
        "cca_layers: expected a tuple of ints": {"cca_layers": 6},
        "share_embeddings: expected a bool": {"share_embeddings": 1},
        "dropout: expected a number": {"dropout": "0"},
    },
}


@pytest.mark.parametrize("error, message", [(error, message) for error in REFUSED for message in REFUSED[error]])
def test_refuses(error, message):
    refused(message, tiny.config, **REFUSED[error][message], error=error)


def test_from_dict_refuses():
    refused("unknown depth", RetroConfig.from_dict, tiny.config().to_dict() | {"depth": 3})
    with pytest.raises(ValueError, match="none of vocab_size"):
        RetroConfig.from_dict({k: v for k, v in tiny.config().to_dict().items() if k != "vocab_size"})
    refused(r"name: expected one of 172m, 425m, 1\.5b, 7\.5b; got '7b'", RetroConfig.preset, "7b")


def test_initial_weights():
    """Their spread; logits of a fresh model have a variance near 1, so the residual stream does not explode."""
    torch.manual_seed(0)
    model = Retro(tiny.config(d_model=256, d_ff=1024, num_layers=6, cca_layers=(2, 4, 6), vocab_size=512))
    assert abs(model.layers[0].feed_forward.inner.weight.std().item() * 256**0.5 - 1) < 0.02
    assert abs(model.layers[0].feed_forward.output.weight.std().item() * (1024 * 15) ** 0.5 - 1) < 0.02
    tokens = torch.randint(0, 512, (2, 32))
    logits = model(tokens, torch.randint(0, 512, (2, 8, 2, 6)))
    assert 0.7 < logits.std().item() < 1.3


def test_a_small_model_has_an_encoder_of_its_own_sizes():
    small = RetroConfig.small(50, d_model=64, d_ff=128, num_heads=4, num_layers=3, chunk_len=8, max_len=32)
    assert (small.head_dim, small.neighbour_len, small.cca_layers, small.encoder_layers) == (16, 16, (3,), 1)
    encoder = (small.encoder_d_model, small.encoder_d_ff, small.encoder_heads, small.encoder_head_dim)
    assert encoder == (small.d_model, small.d_ff, small.num_heads, small.head_dim) and small.max_len == 32
    assert RetroConfig.small(50, 64, 128, 4, 3, 8, cca_layers=(2, 3), encoder_d_ff=64).encoder_d_ff == 64
