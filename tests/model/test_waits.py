"""The host runs ahead of the device: on a stand-in that counts waits, a training step waits once, a
decode step never.
"""

import copy
import math

import pytest
import torch

from retro_model import generation, training
from tests import standin
from tests.conftest import COMPILED, INTERPRETER
from tests.model import test_own_attention as own
from tests.model import tiny
from tests.model.rpt import tiny as tiny_rpt

pytestmark = pytest.mark.skipif(INTERPRETER or COMPILED, reason="the stand-in needs no kernels")
SETTINGS = training.Settings(steps=10, warmup_steps=1)


def on_the_stand_in(model):
    return standin.module_to(copy.deepcopy(model))


def a_batch():
    tokens, neighbours, _ = tiny.inputs(N=8)
    return training.Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), neighbours)


def test_a_training_step_waits_for_its_report_alone():
    model = tiny.model()
    far, batch = on_the_stand_in(model), a_batch()
    want = training.train_step(model, training.make_optimizer(model, SETTINGS), [batch], SETTINGS, 0)
    with standin.standing_in() as waits:
        optimizer = training.make_optimizer(far, SETTINGS)
        report = training.train_step(far, optimizer, [batch.to(standin.DEVICE)], SETTINGS, 0)
        assert waits == ["tolist"]
    assert report == pytest.approx(want, rel=1e-4)
    for one, other in zip(model.parameters(), far.parameters(), strict=True):
        torch.testing.assert_close(other.detach().held, one.detach(), rtol=1e-4, atol=1e-6)


def test_a_gradient_that_is_not_finite_changes_nothing_without_a_look():
    far = on_the_stand_in(tiny.model())
    before = [p.detach().held.clone() for p in far.parameters()]
    with standin.standing_in() as waits:
        optimizer = training.make_optimizer(far, SETTINGS)
        next(far.parameters()).held[...] = math.inf
        before[0] = next(far.parameters()).held.clone()
        with pytest.raises(FloatingPointError):
            training.train_step(far, optimizer, [a_batch().to(standin.DEVICE)], SETTINGS, 0)
        assert waits == ["tolist"]
    assert all(torch.equal(p.detach().held, q) for p, q in zip(far.parameters(), before, strict=True))


@pytest.mark.parametrize(
    "make, stop_token", [(tiny.model, None), (tiny.model, 0), (tiny_rpt.model, None)], ids=["retro", "stop", "rpt"]
)
def test_decoding_does_not_wait_for_a_token(make, stop_token):
    """Twice the tokens, as many waits. The host waits only to see whether all rows have ended, every eighth column."""
    model = make(dtype=torch.float32).eval()
    prompt = torch.randint(1, tiny_rpt.VOCAB, (2, 3), generator=torch.Generator().manual_seed(2))
    far, counts = on_the_stand_in(model), []
    with standin.standing_in() as waits:
        for new in (8, 16):
            waits.clear()
            made = generation.generate(far, prompt.to(standin.DEVICE), new, temperature=0.0, stop_token=stop_token)
            counts.append(len(waits))
    assert counts[1] - counts[0] <= (0 if stop_token is None else 1), waits
    want = generation.generate(model, prompt, 16, temperature=0.0, stop_token=stop_token)
    assert [row.tolist() for row in made] == [row.tolist() for row in want]


def test_an_own_attention_step_waits_for_neighbours_alone():
    """The host reads neighbours where a chunk completes; between chunks it does not wait."""
    tokens, neighbours, mask = own.batch()
    far, counts = standin.module_to(own.own("Llama")[1]), []
    with standin.standing_in() as waits, torch.no_grad():
        cache = far.make_cache(2)
        tokens, neighbours, mask = (t.to(standin.DEVICE) for t in (tokens, neighbours, mask))
        far(tokens[:, :9], neighbours=neighbours[:, :2], neighbour_mask=mask[:, :2], cache=cache)
        for at in range(9, 15):
            waits.clear()
            new = slice(at // own.M, at // own.M + 1) if cache.completes(1) else slice(0)
            far(tokens[:, at : at + 1], neighbours=neighbours[:, new], neighbour_mask=mask[:, new], cache=cache)
            counts.append(len(waits))
    assert counts[2] and not any(counts[:2] + counts[3:]), counts
