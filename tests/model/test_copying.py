"""Weights that copy from the first step, and the sizes they need."""

import pytest
import torch

from retro_model import copying
from retro_model.config import RetroConfig
from retro_model.retro import Retro

CONFIG = RetroConfig(
    vocab_size=300, d_model=64, d_ff=128, num_heads=4, head_dim=16, num_layers=2, chunk_len=8, neighbour_len=16, cca_layers=(2,),
    encoder_layers=1, encoder_d_model=64, encoder_d_ff=128, encoder_heads=4, encoder_head_dim=16, share_embeddings=True, max_len=64,
)  # fmt: skip


def ranks(model: Retro) -> tuple[float, float]:
    """Of the token that follows the current one in the neighbour: mean rank of its logit with retrieval, and without."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 300, (16, 16), generator=g)
    neighbours = torch.randint(2, 300, (16, 2, 1, 16), generator=g)
    neighbours[:, 0, 0, 3:11] = tokens[:, 8:]  # chunk 0's neighbour holds what chunk 1 says, elsewhere
    target = tokens[:, 9:]

    def rank(logits):
        logits = logits[:, 8:15]
        return (logits > logits.gather(-1, target[..., None])).sum(-1).float().mean().item()

    with torch.no_grad():
        return rank(model(tokens, neighbours)), rank(model(tokens))


def test_it_copies_before_it_has_learned_anything():
    torch.manual_seed(0)
    model = Retro(CONFIG)
    unprepared = ranks(model)
    copying.start_copying(model)
    on, off = ranks(model)
    assert on < 15 and off > 75  # of 300 tokens; chance is 149.5
    assert min(unprepared) > 75


def test_retrieval_off_is_the_baseline_it_is_compared_with():
    """Both get the same embeddings and readout from the same seed."""
    models = [Retro(CONFIG), Retro(CONFIG.baseline())]
    copying.start_copying(models[0], 5)
    copying.align(models[1], 5, turned=True)
    assert torch.equal(models[0].embedding.weight, models[1].embedding.weight) and torch.equal(
        models[0].readout.weight, models[1].readout.weight
    )


@pytest.mark.parametrize("change", [{"share_embeddings": False}, {"num_heads": 2}, {"cca_layers": ()}])
def test_sizes_that_do_not_fit_are_refused(change):
    with pytest.raises(ValueError, match="share_embeddings"):
        copying.start_copying(Retro(CONFIG.replace(**change)))
