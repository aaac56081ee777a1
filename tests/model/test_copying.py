"""Weights that copy from the first step, and the sizes they need."""

import pytest
import torch

from retro_model.layers import copying
from retro_model.retro import Retro
from retro_model.retro.config import RetroConfig

CONFIG = RetroConfig.small(300, 64, 128, num_heads=2, num_layers=3, chunk_len=8, share_embeddings=True, max_len=64)


def ranks(model: Retro) -> tuple[float, float]:
    """Return mean ranks, with and without retrieval, of the token that follows the current one in the neighbour."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 300, (16, 16), generator=g)
    neighbours = torch.randint(2, 300, (16, 2, 1, 16), generator=g)
    neighbours[:, 0, 0, 3:11] = tokens[:, 8:]  # chunk 0's neighbour contains chunk 1, shifted
    target = tokens[:, 9:]

    def rank(logits):
        logits = logits[:, 8:15]
        return (logits > logits.gather(-1, target[..., None])).sum(-1).float().mean().item()

    with torch.no_grad():
        return rank(model(tokens, neighbours)), rank(model(tokens))


def repeated_rank(model: Retro) -> float:
    """Return the mean rank of the token that followed the current one earlier in the context."""
    tokens = torch.randint(2, 300, (16, 8), generator=torch.Generator().manual_seed(1)).repeat(1, 2)
    with torch.no_grad():
        logits = model(tokens)[:, 8:15]
    return (logits > logits.gather(-1, tokens[:, 9:, None])).sum(-1).float().mean().item()


def test_retro_copies_from_neighbours_before_it_has_learned_anything():
    torch.manual_seed(0)
    model = Retro(CONFIG)
    unprepared = ranks(model)
    copying.start_copying(model)
    on, off = ranks(model)
    assert on < 40 and off > 100  # of 300 tokens; chance is 149.5
    assert min(unprepared) > 100


@pytest.mark.parametrize("config", [CONFIG, CONFIG.baseline()], ids=["retro", "baseline"])
def test_both_copy_from_their_own_context(config):
    torch.manual_seed(0)
    model = Retro(config)
    unprepared = repeated_rank(model)
    copying.start_copying(model)
    assert repeated_rank(model) < 30 and unprepared > 100


def test_retro_and_its_baseline_begin_with_the_same_circuit():
    models = [Retro(CONFIG), Retro(CONFIG.baseline())]
    for model in models:
        copying.start_copying(model, 5)
    a, b = (dict(model.named_parameters()) for model in models)
    for name in (
        "embedding.weight",
        "readout.weight",
        "layers.0.attention.output.weight",
        "layers.1.attention.key.weight",
    ):
        assert torch.equal(a[name], b[name])


@pytest.mark.parametrize("change", [{"share_embeddings": False}, {"num_heads": 4}, {"cca_layers": (1,)}])
def test_sizes_that_do_not_fit_are_refused(change):
    with pytest.raises(ValueError, match="share_embeddings"):
        copying.start_copying(Retro(CONFIG.replace(**change)))
