"""Training a Memory Mosaic with the common training code: groups, steps, exact resume. Processes:
test_distributed.py.
"""

import pytest
import torch

from retro_model import training
from retro_model.memory_mosaics import MemoryMosaics
from tests.model import toys
from tests.model.memory_mosaics import tiny

SETTINGS = training.Settings(steps=6, warmup_steps=2, max_lr=1e-2)


def make(**changes):
    torch.manual_seed(7)
    model = MemoryMosaics(tiny.config(vocab_size=17, attention_dropout=0.1, output_dropout=0.1, **changes))
    return model, training.make_optimizer(model, SETTINGS)


def run(model, optimizer, start, stop):
    stream = training.batches(toys.random_store(41), window=8, batch_size=4, seed=5, start=start)
    return toys.untimed(training.train(model, optimizer, stream, SETTINGS, start=start, stop=stop))


def test_what_decays_is_a_matrix_and_no_embedding():
    """A persistent memory's pairs are matrices of a feed-forward and decay; scalars and gains do not."""
    model, _ = make()
    decayed, others = (group["params"] for group in training.parameter_groups(model, 0.1))
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)].split(".", 2)[-1] for p in decayed} == {
        "context.key.weight",
        "context.value.weight",
        "context.output.weight",
        "persistent.key.weight",
        "persistent.output.weight",
        "persistent.keys",
        "persistent.values",
    }
    assert len(decayed) == 7 * 2 and len(decayed) + len(others) == len(names)


def test_it_learns():
    """Every parameter moves, and the loss on repeated data falls below chance."""
    model, optimizer = make()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run(model, optimizer, 0, 6)
    assert not [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    tokens = torch.randint(0, 17, (2, 12)).repeat(1, 2)
    batch, settings = (
        training.Batch(tokens, torch.ones_like(tokens, dtype=torch.bool)),
        training.Settings(40, 1e-2, warmup_steps=0),
    )
    losses = [h["loss"] for h in training.train(model, optimizer, iter([batch] * 40), settings)]
    assert losses[-1] < 0.5 * losses[0]


def test_the_loss_of_marked_tokens_is_that_of_their_logits():
    model, tokens = tiny.model(dtype=torch.float64, logit_scale=0.5), tiny.tokens()
    marked = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(1)) < 0.7
    losses, _ = training.token_losses(model(tokens), training.Batch(tokens, marked))
    got = model(tokens, loss_mask=marked)
    torch.testing.assert_close(got.losses, losses.detach())
    torch.testing.assert_close(got.total, losses.sum())
    with pytest.raises(ValueError, match=r"loss_mask: expected \[B,N\]"):
        model(tokens, loss_mask=marked[:, 1:])


def test_a_step_on_packed_documents_is_one_on_each_alone():
    """The end of one document teaches nothing about the start of the next."""
    lengths, tokens = (4, 9, 6), tiny.tokens(B=1)
    segment = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).unsqueeze(0)
    packed, alone = (tiny.model(dtype=torch.float64) for _ in range(2))
    loss, _ = training.batch_loss(
        packed, training.Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), segment=segment)
    )
    loss.total.backward()
    total = 0.0
    for part in tokens.split(lengths, 1):
        one, _ = training.batch_loss(alone, training.Batch(part, torch.ones_like(part, dtype=torch.bool)))
        one.total.backward()
        total += float(one.total.detach())
    assert float(loss.total.detach()) == pytest.approx(total, rel=1e-12)
    for (name, p), q in zip(packed.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12, msg=name)
