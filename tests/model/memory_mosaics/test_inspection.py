"""Inspection: errors, attention and skill against loops."""

import itertools

import numpy as np
import torch

from retro_kernels.testing import relative_error
from retro_model.memory_mosaics.inspection import inspect
from tests.model.memory_mosaics import tiny
from tests.model.memory_mosaics.naive import Naive, layer_norm, norm, stored


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
