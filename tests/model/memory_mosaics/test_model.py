"""Memory Mosaics: the paper's equations one token at a time, causality, documents, errors."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

import retro_kernels as rk
from retro_kernels.testing import assert_passes, relative_error, tolerances
from retro_model import memory_mosaics, training
from retro_model.memory_mosaics import ContextualMemory, MemoryMosaics, MosaicsConfig, PersistentMemory
from retro_model.memory_mosaics.contextual_memory import normalised
from retro_model.memory_mosaics.inspection import inspect
from tests.model import toys
from tests.model.memory_mosaics import tiny
from tests.model.memory_mosaics.naive import Naive, derivative, layer_norm, norm, stored
from tests.refusals import refused

EXACT = tolerances.FLOOR[torch.float64]
VARIANTS = {
    "heads of 16": {},
    "narrow heads, scaled logits": {"d_model": 18, "logit_scale": 18**-0.5},
    "heads of 20, one block": {"d_model": 20, "num_heads": 1, "num_layers": 1, "persistent_slots": 1},
}


def gradients(model, tokens, weights, **options) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (model(tokens, **options) * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_equations_one_token_at_a_time(name):
    model, tokens = tiny.model(dtype=torch.float64, **VARIANTS[name]), tiny.tokens(B=2, N=11)
    naive = Naive(model.config, stored(model))
    want = torch.from_numpy(np.stack([naive.logits(row.tolist()) for row in tokens]))
    assert relative_error(model(tokens), want) < EXACT


@pytest.mark.parametrize("name", ["heads of 16", "narrow heads, scaled logits"])
def test_gradients_of_every_parameter_equal_those_of_the_equations(name):
    """Two random directions per matrix, every entry of a scalar or gain."""
    model, tokens = tiny.model(dtype=torch.float64, **VARIANTS[name]), tiny.tokens(B=1, N=6)
    random = np.random.default_rng(0)
    weights = random.normal(size=(6, tiny.VOCAB))
    grads, parameters = gradients(model, tokens, torch.from_numpy(weights)), stored(model)
    for parameter, gradient in grads.items():
        shape = gradient.shape
        directions = (
            np.eye(len(gradient)) if gradient.dim() == 1 and len(gradient) < 8 else random.normal(size=(2, *shape))
        )
        for direction in directions:
            want = derivative(model.config, parameters, parameter, direction, tokens[0].tolist(), weights)
            got = float((gradient * torch.from_numpy(direction)).sum())
            assert got == pytest.approx(want, rel=1e-9, abs=1e-9), parameter
    assert grads["blocks.0.context.stored_key_scale"][0] == 0 != grads["blocks.0.context.stored_key_scale"][1]


def test_initial_scalars_are_those_of_the_authors():
    memory = ContextualMemory(96, 12)
    torch.testing.assert_close(memory.decay, torch.exp(-torch.linspace(0.5, 5, 12)))
    torch.testing.assert_close(memory.key_scale, torch.full((12,), 1.0).exp())
    torch.testing.assert_close(memory.value_scale, torch.full((12,), -0.5).exp())
    assert bool(((memory.value_now >= 0) & (memory.value_now < 1)).all())
    torch.testing.assert_close(PersistentMemory(96, 12, 5).query_scale, torch.full((12,), 2.0).exp())


def test_initial_weights_have_the_authors_spreads():
    """W ~ N(0, 1/fan_in), writes to the residual stream divided by the square root of the depth, K and
    V ~ N(0, 1/hd).
    """
    torch.manual_seed(0)
    model = MemoryMosaics(
        tiny.config(vocab_size=500, d_model=96, num_heads=3, num_layers=4, persistent_slots=64, embedding_std=0.3)
    )
    expected = {
        "key.weight": 96**-0.5,
        "value.weight": 96**-0.5,
        "output.weight": (96 * 4) ** -0.5,
        "keys": 32**-0.5,
        "values": 32**-0.5,
    }
    weights = [(name, p, name.split(".", 1)[1]) for name, p in model.blocks[2].named_parameters()]
    assert expected.keys() <= {kind for _, _, kind in weights}
    for name, parameter, kind in weights:
        if kind in expected:
            assert parameter.std().item() == pytest.approx(expected[kind], rel=0.05), name
    assert model.embedding.weight.std().item() == pytest.approx(0.3, rel=0.05)


def test_a_decay_stored_as_zero_stays_below_one():
    memory = ContextualMemory(32, 2)
    with torch.no_grad():
        memory.stored_decay.zero_()
    assert float(memory.decay.detach().max()) < 1
    assert memory(torch.randn(1, 9, 32)).isfinite().all()


@pytest.mark.parametrize(
    ("name", "parameters"), [("small", 123_588_336), ("small-1", 45_713_748), ("small-18", 166_065_384)]
)
def test_presets_have_the_papers_sizes(name, parameters):
    model = MemoryMosaics(MosaicsConfig.preset(name), device="meta")
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert sum(p.numel() for p in model.blocks[0].parameters()) == 7_079_508


def test_a_token_changes_nothing_before_it_and_all_from_it_on():
    model, tokens = tiny.model(), tiny.tokens(B=1)
    base = model(tokens)
    for t in range(tokens.shape[1]):
        changed = tokens.clone()
        changed[0, t] = (tokens[0, t] + 1) % tiny.VOCAB
        moved = (model(changed) != base).any(-1)[0].nonzero().flatten().tolist()
        assert moved == list(range(t, tokens.shape[1])), t


@pytest.mark.parametrize("N", [1, 2, 18])
def test_a_prefix_has_the_logits_it_has_in_the_whole(N):
    model, tokens = tiny.model(dtype=torch.float64), tiny.tokens()
    assert relative_error(model(tokens[:, :N]), model(tokens)[:, :N]) < EXACT


def test_packed_documents_are_each_as_if_alone():
    model, tokens = tiny.model(dtype=torch.float64), tiny.tokens(N=17)
    segment = torch.tensor([[4] * 5 + [9] * 1 + [4] * 11, [0] * 8 + [1] * 9])  # 4 comes back: another document
    got = model(tokens, segment=segment)
    for row, lengths in ((0, [5, 1, 11]), (1, [8, 9])):
        want = torch.cat([model(document[None])[0] for document in tokens[row].split(lengths)])
        assert relative_error(got[row], want) < EXACT


def test_a_vector_of_zeros_normalises_to_zeros_without_nan():
    x = torch.zeros(1, 2, 1, 16)
    x[0, 1] = 3.0
    x.requires_grad_()
    scale = torch.tensor([2.0], requires_grad=True)
    y = normalised(x, scale)
    assert torch.equal(y[0, 0], torch.zeros(1, 16)) and torch.allclose(y[0, 1].norm(), torch.tensor(2.0))
    y.sum().backward()
    assert x.grad[0, 0].abs().max() == 0 and x.grad.isfinite().all() and scale.grad.isfinite().all()


@pytest.mark.parametrize("backend", [b for b in ("cpu", "triton") if rk.backends()["relative_attention"][b]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backends_and_types(backend, dtype):
    tokens = tiny.tokens(N=40)
    want = tiny.model(dtype=torch.float64)(tokens)
    eager = tiny.model(dtype=dtype, backend="reference")(tokens)
    assert_passes("logits", tiny.model(dtype=dtype, backend=backend)(tokens), want, eager, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model, tokens = tiny.model(), tiny.tokens(N=40)
    with torch.no_grad():
        model.blocks[0].context.stored_key_scale[0] = 0.1
    want = tiny.model(dtype=torch.float64)
    want.load_state_dict(model.state_dict())
    with torch.autocast("cpu", dtype=dtype):
        logits = model(tokens)
        logits.float().square().mean().backward()
    half = tiny.model(dtype=dtype)
    half.load_state_dict(model.state_dict())
    assert logits.dtype == dtype
    # weights in float32, products in the half type: at most twice the error of a model in the half type
    assert (
        relative_error(logits, want(tokens)) < 2 * relative_error(half(tokens), want(tokens)) + tolerances.FLOOR[dtype]
    )
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_checkpointing_gives_the_same_gradients():
    tokens, weights = tiny.tokens(), torch.randn(2, 19, tiny.VOCAB)
    options = {"attention_dropout": 0.2, "output_dropout": 0.2}
    grads = []
    for checkpoint in (False, True):
        model = tiny.model(checkpoint=checkpoint, **options).train()
        torch.manual_seed(3)
        grads.append(gradients(model, tokens, weights, segment=torch.arange(19).expand(2, 19) // 7))
    for name in grads[0]:
        assert torch.equal(grads[0][name], grads[1][name]), name


def test_dropout_is_in_training_only_and_repeatable():
    tokens = tiny.tokens()
    plain, dropping = tiny.model(), tiny.model(attention_dropout=0.5)
    assert torch.equal(plain(tokens), dropping(tokens))
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(dropping.train()(tokens))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    assert not torch.equal(runs[0], plain(tokens))


def test_compiles_to_one_graph():
    """With documents, which need every line of the model that a call without them needs."""
    torch._dynamo.reset()
    model, tokens, weights = tiny.model(), tiny.tokens(), torch.randn(2, 19, tiny.VOCAB)
    options = {"segment": torch.arange(19).expand(2, 19) // 7}
    want, gradient = model(tokens, **options), gradients(model, tokens, weights, **options)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(tokens, **options), want) < tolerances.FLOOR[torch.float32]
    got = {n.removeprefix("_orig_mod."): g for n, g in gradients(compiled, tokens, weights, **options).items()}
    for name in gradient:
        assert relative_error(got[name], gradient[name]) < tolerances.FLOOR[torch.float32], name


def test_a_model_on_the_meta_device_is_given_memory():
    fresh, model = MemoryMosaics(tiny.config()), MemoryMosaics(tiny.config(), device="meta").to_empty(device="cpu")
    for m in (fresh, model):
        torch.manual_seed(0)
        m.reset_parameters()
    for (name, p), q in zip(fresh.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q), name


BAD_SIZES = {
    "vocab_size": (0, ValueError),
    "d_model": (2.0, TypeError),
    "num_heads": (5, ValueError),
    "num_layers": (True, TypeError),
    "persistent_slots": (0, ValueError),
    "attention_dropout": (1.0, ValueError),
    "output_dropout": (-0.1, ValueError),
    "logit_scale": (0.0, ValueError),
    "embedding_std": (float("nan"), ValueError),
}


@pytest.mark.parametrize("field", BAD_SIZES)
def test_a_bad_size_is_named(field):
    value, error = BAD_SIZES[field]
    refused(rf"^{field}: expected .*; got", tiny.config, **{field: value}, error=error)


def test_a_bad_preset_and_a_bad_field_are_named():
    refused("name: expected one of small", MosaicsConfig.preset, "huge")
    refused("unknown d_ff", MosaicsConfig.from_dict, {"vocab_size": 3, "d_ff": 4})
    assert MosaicsConfig.from_dict(tiny.config().to_dict()) == tiny.config()


BAD_INPUTS = {
    "tokens: expected token ids from 0": lambda m, t: m(t + tiny.VOCAB),
    "tokens: expected torch.int64": lambda m, t: m(t.int()),
    r"tokens: expected \[B,N\]": lambda m, t: m(t[0]),
    "tokens: expected N >= 1": lambda m, t: m(t[:, :0]),
    r"segment: expected \[B,N\] with N=19": lambda m, t: m(t, segment=t[:, 1:]),
    "segment: expected integers": lambda m, t: m(t, segment=t.float()),
    "segment: expected None with a cache": lambda m, t: m(t, segment=t, cache=m.make_cache(2)),
    "cache: expected one of this model's": lambda m, t: m(t, cache=tiny.model(num_layers=1).make_cache(2)),
    r"tokens: expected \[B,N\] with B=3": lambda m, t: m(t, cache=m.make_cache(3)),
    "evict: expected one of oldest": lambda m, t: m.make_cache(2, 4, evict="newest"),
    "capacity: expected an int >= 1": lambda m, t: m.make_cache(2, 0),
    r"x: expected \[B,N,d_model\] with d_model=48": lambda m, t: m.blocks[0].context(torch.zeros(1, 2, 47)),
    "slots: expected an int >= 1": lambda m, t: PersistentMemory(32, 2, 0),
    "num_heads: expected a divisor of d_model=32": lambda m, t: ContextualMemory(32, 5),
    "attention_dropout: expected a probability": lambda m, t: ContextualMemory(32, 2, attention_dropout=1),
}


@pytest.mark.parametrize("message", BAD_INPUTS)
def test_bad_input_is_named(message):
    refused(f"^{message}.*; got", BAD_INPUTS[message], tiny.model(), tiny.tokens(), error=(ValueError, TypeError))


def test_the_equations_stay_readable():
    """The model's file has less than 250 lines; with configuration and memories it has less than 520."""
    folder, names = Path(memory_mosaics.__file__).parent, ("model", "config", "contextual_memory")
    lines = [len((folder / f"{name}.py").read_text().splitlines()) for name in names]
    assert lines[0] < 250 and sum(lines) < 520


def test_the_first_block_is_what_the_equations_say():
    model, tokens = tiny.model(dtype=torch.float64), tiny.tokens(B=2, N=9)
    inspected, naive, prefix = inspect(model, tokens)[0], Naive(model.config, stored(model)), "blocks.0.context"
    c = naive.parameters[f"{prefix}.value_now"]
    for b, row in enumerate(tokens.tolist()):
        x = [
            layer_norm(naive.parameters["embedding.weight"][t], naive.parameters[f"{prefix}_norm.weight"]) for t in row
        ]
        kbar, projected = naive.averages(prefix, x), [naive.heads(f"{prefix}.value.weight", y) for y in x]
        for head in range(3):
            scale = naive.value_scale(prefix)[head]
            key = [naive.key_scale(prefix)[head] * norm(k[head]) for k in kbar]
            value = [
                scale * norm(c[head] * p[head] + (1 - c[head]) * q[head]) for p, q in itertools.pairwise(projected)
            ]
            for t in range(1, 8):
                logits = np.array([key[t] @ k for k in key[:t]])
                weights = np.exp(logits - logits.max())
                weights /= weights.sum()
                np.testing.assert_allclose(inspected.attention[b, head, t, :t].numpy(), weights, rtol=1e-8, atol=1e-12)
                assert inspected.attention[b, head, t, t:].abs().max() == 0
                y, mean = weights @ np.array(value[:t]), np.mean(value[:t], 0)
                np.testing.assert_allclose(inspected.error[b, t, head], np.linalg.norm(y - value[t]) / scale, rtol=1e-8)
                np.testing.assert_allclose(
                    inspected.baseline[b, t, head], np.linalg.norm(mean - value[t]) / scale, rtol=1e-8
                )
            np.testing.assert_allclose(inspected.error[b, 0, head], 1)  # the memory is empty: it reads 0
    assert len(inspect(model, tokens)) == 2


def test_a_later_block_sees_what_the_model_gives_it():
    """The reads of every block, by hooks on the model, have the distance `error` from the values."""
    model, tokens = tiny.model(dtype=torch.float64), tiny.tokens()
    reads = []
    memory = model.blocks[1].context
    memory.output.register_forward_pre_hook(lambda module, inputs: reads.append(inputs[0].unflatten(-1, (3, 16))))
    inputs = []
    memory.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    model(tokens)
    values = memory.values(memory.heads_of(memory.value(inputs[0])))
    want = (reads[0][:, :-1] - values).norm(dim=-1) / memory.value_scale
    assert relative_error(inspect(model, tokens)[1].error, want) < 1e-10


def test_a_period_is_foreseen_and_noise_is_not():
    """Narrow kernels on tokens of period three: after one period every value is predicted."""
    model = tiny.model(dtype=torch.float64, num_layers=1)
    memory = model.blocks[0].context
    with torch.no_grad():
        memory.stored_key_scale.fill_(0.4)
        memory.stored_decay.fill_(1.0)  # keys of the last token alone
    periodic = inspect(model.train(), torch.tensor([[1, 5, 9] * 12]))[0].skill
    noise = inspect(model, torch.randint(0, tiny.VOCAB, (8, 36)))[0].skill
    assert periodic.min() > 0.8 and noise.max() < 0.5 and model.training


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
    refused(r"loss_mask: expected \[B,N\]", model, tokens, loss_mask=marked[:, 1:])


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
