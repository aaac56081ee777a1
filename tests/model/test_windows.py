"""Windows for DataLoader, Trainer and Lightning: the batches of `training.batches`, with workers, resumed exactly."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from retro_model import Retro, training
from retro_model.training import WindowDataset, batches
from tests.model import tiny, toys
from tests.refusals import refused

M, V = 4, 17


def prepared(**changes):
    store = toys.random_store(40, M, V)
    database = toys.Database(store)
    neighbours = np.random.default_rng(0).integers(0, len(store.lengths), (len(store.lengths), 3))
    options = {"window": 3 * M, "batch_size": 4, "seed": 5, "neighbours": neighbours, "database": database, "k": 2}
    return store, options | changes


def first(loader, count):
    return [batch for batch, _ in zip(loader, range(count))]


def assert_same(loaded, wanted):
    for got, want in zip(loaded, wanted, strict=True):
        assert torch.equal(got["input_ids"], want.tokens)
        assert torch.equal(got["labels"], torch.where(want.real, want.tokens, -100))
        assert torch.equal(got["neighbours"], want.neighbours)
        assert torch.equal(got["neighbour_mask"], want.neighbour_mask)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_and_prefetching_change_nothing(workers):
    store, options = prepared()
    want = first(batches(store, **options), 7)
    prefetch = {"prefetch_factor": 2} if workers else {}
    loaded = first(DataLoader(WindowDataset(store, **options), batch_size=4, num_workers=workers, **prefetch), 7)
    assert_same(loaded, want)
    resumed = WindowDataset(store, **options)
    resumed.set_start(3)
    assert_same(first(DataLoader(resumed, batch_size=4, num_workers=workers, **prefetch), 4), want[3:])


def test_prefetched_batches_are_those_of_the_stream():
    store, options = prepared(batch_size=2)
    want = first(batches(store, **options | {"batch_size": 4}, rank=1, world_size=2), 5)
    for workers in (0, 1):
        rows = WindowDataset(store, rank=1, world_size=2, start=1, **options)
        for got, batch in zip(first(training.prefetched(rows, workers), 4), want[1:], strict=True):
            for name in ("tokens", "real", "neighbours", "neighbour_mask"):
                assert torch.equal(getattr(got, name), getattr(batch, name)), name
    alone = next(training.prefetched(WindowDataset(store, window=3 * M, batch_size=2, seed=5), 0))
    assert alone.neighbours is None and alone.tokens.shape == (2, 3 * M)


def test_what_a_step_waits_for_data(monkeypatch):
    """By a fake clock: 3 seconds for each batch, 2 for the model."""
    clock, seen = [0.0], []
    monkeypatch.setattr(training.step.time, "perf_counter", lambda: clock[0])

    def slow(stream):
        for batch in stream:
            clock[0] += 3
            yield batch

    model, settings = toys.Bigram(), training.Settings(steps=20, warmup_steps=2, max_lr=1e-2)
    model.register_forward_hook(lambda *_: clock.__setitem__(0, clock[0] + 2))
    optimizer = training.make_optimizer(model, settings)
    stream = slow(batches(toys.random_store(41), window=8, batch_size=2, seed=5))
    training.train(model, optimizer, stream, settings, stop=2, report=lambda _, results: seen.append(results))
    assert [(r["seconds"], r["waiting"]) for r in seen] == [(5, 0.6)] * 2
    both = training.train(model, optimizer, stream, settings, stop=1, accumulate=2)
    assert (both[0]["seconds"], both[0]["waiting"]) == (10, 0.6)


def test_refuses():
    store, options = prepared()
    refused("window: expected a positive multiple", WindowDataset, store, **options | {"window": 5})
    refused("start and every: expected at least 0 and 1", WindowDataset(store, **options).set_start, -1)


def retrofit_of(store):
    pytest.importorskip("transformers")
    from retro_model.integrations.huggingface import RetrofitForCausalLM
    from tests.model import decoders

    torch.manual_seed(0)
    decoder = decoders.llama(V, 2)
    options = dict(encoder_layers=1, encoder_d_model=16, encoder_d_ff=16, encoder_heads=1, encoder_head_dim=16)
    options |= dict(cca_layers=(2,), chunk_len=M, cca_output="fresh")
    return decoders.trainer, RetrofitForCausalLM.from_decoder(decoder, **options)


def test_the_trainer_resumes_exactly(tmp_path):
    """Stopped after 2 of 4 steps and resumed, by skipping batches or by `start`: the weights of an uninterrupted
    run.
    """
    store, options = prepared(batch_size=2)

    def run(name, steps, start=0, workers=0, skip=False):
        trainer, model = retrofit_of(store)
        sizes = dict(max_steps=steps, gradient_accumulation_steps=2, save_steps=2, lr_scheduler_type="constant")
        data = dict(dataloader_num_workers=workers, ignore_data_skip=skip)
        data |= dict(train_dataset=WindowDataset(store, start=start, **options))
        kept = str(tmp_path / "parts" / "checkpoint-2") if name == "again" else None
        trainer(model, tmp_path / name, **sizes, **data).train(resume_from_checkpoint=kept)
        return {name: p.detach() for name, p in model.named_parameters()}

    want = run("whole", 4)
    run("parts", 2)
    for resumed in (run("again", 4, start=4, skip=True), run("again", 4, workers=2)):
        assert all(torch.equal(resumed[name], want[name]) for name in want)
    other = run("other", 4, start=1)
    assert not all(torch.equal(other[name], want[name]) for name in want)


def test_lightning_trains_from_it(tmp_path):
    lightning = pytest.importorskip("pytorch_lightning")
    store, options = prepared()

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.retro, self.losses = Retro(tiny.config(vocab_size=V, chunk_len=M, neighbour_len=2 * M)), []

        def training_step(self, batch, _):
            counted = batch["labels"] != -100
            inputs = {name: batch[name] for name in ("neighbours", "neighbour_mask")}
            loss = self.retro(batch["input_ids"], **inputs, loss_mask=counted).total / counted[:, 1:].sum()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = Model()
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(max_steps=4, accelerator="cpu", devices=1, default_root_dir=tmp_path, **off)
    trainer.fit(model, DataLoader(WindowDataset(store, **options), batch_size=4, num_workers=1))
    ours = Model().retro
    optimizer, losses = torch.optim.SGD(ours.parameters(), lr=0.1), []
    for batch in first(batches(store, **options), 4):
        loss = training.batch_loss(ours, batch)[0].total / batch.real[:, 1:].sum()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert model.losses == pytest.approx(losses, rel=1e-5)
