"""Sampling against a loop of whole forward passes; rows of different lengths against each alone; errors."""

import warnings

import numpy as np
import pytest
import torch

from retro_model.generation import generate, sample
from tests.model import tiny

M, K, R = 4, 2, 6


def retrieve(chunks):
    """Return neighbours that depend on every token of the chunk, ragged, some missing."""
    key = (chunks * torch.tensor([1, 3, 7, 11])).sum(-1)
    neighbours = (key[:, None, None] * 5 + torch.arange(K * R).view(K, R) * 3) % tiny.VOCAB
    return neighbours, torch.arange(R) < (key[:, None, None] + 2 * torch.arange(K)[:, None]) % (R + 1)


def slowly(model, prompt, count, with_neighbours=True, stop=None):
    """Decode greedily with a whole forward pass for each token."""
    tokens = list(prompt)
    for _ in range(count):
        inputs = {}
        chunks = len(tokens) // M
        if with_neighbours and chunks:
            neighbours, mask = retrieve(torch.tensor(tokens[: chunks * M]).view(-1, M))
            inputs = {"neighbours": neighbours[None], "neighbour_mask": mask[None]}
        tokens.append(model(torch.tensor([tokens]), **inputs)[0, -1].argmax().item())
        if tokens[-1] == stop:
            break
    return tokens


def prompts(*lengths):
    g = torch.Generator().manual_seed(7)
    return [torch.randint(0, tiny.VOCAB, (n,), generator=g).tolist() for n in lengths]


@pytest.mark.parametrize("lengths", [(4, 4), (1, 8, 2, 7)], ids=str)
def test_greedy_equals_whole_passes_row_by_row(lengths):
    model = tiny.model(dtype=torch.float64)
    rows = prompts(*lengths)
    got = generate(model, rows, 14, retrieve=retrieve)
    assert [row.tolist() for row in got] == [slowly(model, row, 14) for row in rows]


def test_neighbours_matter_to_the_test():
    model = tiny.model(dtype=torch.float64)
    rows = prompts(9)
    off = generate(model, rows, 14)
    assert off[0].tolist() == slowly(model, rows[0], 14, with_neighbours=False)
    assert off[0].tolist() != generate(model, rows, 14, retrieve=retrieve)[0].tolist()


def test_each_chunk_is_retrieved_once_when_it_completes():
    model = tiny.model()
    seen = []

    def recording(chunks):
        seen.append(chunks.tolist())
        return retrieve(chunks)

    got = [row.tolist() for row in generate(model, prompts(6, 3, 8), 7, retrieve=recording)]
    chunks = [row[i : i + M] for row in got for i in range(0, len(row) - M + 1, M)]
    # row 2's last token (of 15) completes no chunk; row 0 has 13, row 1 has 10
    assert sorted(c for call in seen for c in call) == sorted(chunks)
    assert len(seen[0]) == 3 and all(len(call) >= 1 for call in seen)


def test_rows_stop_by_themselves():
    model = tiny.model(dtype=torch.float64)
    rows = prompts(3, 9, 6)
    whole = [slowly(model, row, 20) for row in rows]
    stop = whole[1][11]  # row 1 stops within three tokens
    seen = []

    def recording(chunks):
        seen.extend(chunks.tolist())
        return retrieve(chunks)

    got = generate(model, rows, 20, retrieve=recording, stop_token=stop)
    assert [row.tolist() for row in got] == [slowly(model, row, 20, stop=stop) for row in rows]
    assert len(got[1]) <= 12
    # no retrieval for a row that has ended, not even for a chunk that its last token completes
    assert sorted(seen) == sorted(row[i : i + M].tolist() for row in got for i in range(0, len(row) - M, M))


def test_prompts_as_tensors_and_arrays():
    """As tokenizers and stores return them."""
    model, rows = tiny.model(), prompts(5, 3)
    want = [r.tolist() for r in generate(model, rows, 4)]
    for kind in (np.array, lambda r: np.array(r, np.uint16), lambda r: list(np.array(r))):
        assert [r.tolist() for r in generate(model, [kind(r) for r in rows], 4)] == want
    for kind in (np.array, torch.tensor):
        assert generate(model, kind(rows[:1]), 4)[0].tolist() == want[0]
    assert [r.tolist() for r in generate(model, torch.tensor(rows[:1]), 0)] == rows[:1]


def test_the_mode_is_restored_and_dropout_is_off():
    model = tiny.model(dropout=0.5).train()
    got = [generate(model, prompts(5), 8)[0].tolist() for _ in range(2)]
    assert model.training and got[0] == got[1]


def test_sampling_repeats_with_its_generator():
    model = tiny.model()
    draw = lambda seed: generate(  # noqa: E731
        model, prompts(5, 3), 12, retrieve=retrieve, temperature=1.0, generator=torch.Generator().manual_seed(seed)
    )
    a, b, c = draw(1), draw(1), draw(2)
    assert all(torch.equal(x, y) for x, y in zip(a, b))
    assert any(not torch.equal(x, y) for x, y in zip(a, c))


def test_sample_has_the_distribution_it_says():
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    g = torch.Generator().manual_seed(0)
    n = 20_000
    frequency = lambda **options: torch.bincount(sample(logits.expand(n, 4), generator=g, **options), minlength=4) / n  # noqa: E731
    four_sigma = 4 * 0.5 / n**0.5
    squared = torch.tensor([0.25, 0.0625, 0.0225, 0.01])
    expected = {
        (1.0, 1.0): torch.tensor([0.5, 0.25, 0.15, 0.1]),
        (0.5, 1.0): squared / squared.sum(),
        (1.0, 0.8): torch.tensor([0.5, 0.25, 0.15, 0.0]) / 0.9,  # 0.75 is not yet 0.8
        (1.0, 0.7): torch.tensor([0.5, 0.25, 0.0, 0.0]) / 0.75,
        (1.0, 0.1): torch.tensor([1.0, 0.0, 0.0, 0.0]),
        (0.0, 1.0): torch.tensor([1.0, 0.0, 0.0, 0.0]),
        (1e-300, 1.0): torch.tensor([1.0, 0.0, 0.0, 0.0]),
    }
    for (temperature, top_p), want in expected.items():
        got = frequency(temperature=temperature, top_p=top_p)
        assert (got - want).abs().max() < four_sigma, (temperature, top_p, got)
        assert not got[want == 0].any()


same = lambda x: x  # noqa: E731


def retrieving(length, neighbours=same, mask=same):
    """Generate one token after `length` tokens, with a changed result of `retrieve`."""
    changed = lambda chunks: tuple(change(x) for change, x in zip((neighbours, mask), retrieve(chunks)))  # noqa: E731
    return lambda model: generate(model, [[1] * length], 1, retrieve=changed)


REFUSED = {
    ValueError: {
        "prompts: expected at least one": lambda m: generate(m, [], 3),
        r"prompts\[1\]: expected a prompt of at least one token": lambda m: generate(m, [[1], []], 3),
        r"prompts\[0\]: expected token ids from 0 to V-1 = 36; got 37": lambda m: generate(m, [[1, 37]], 3),
        r"prompts\[0\]: expected token ids from 0 to V-1 = 36; got -1": lambda m: generate(m, [[1, -1]], 3),
        r"prompts: expected \[B,N\] .*; got shape \[2\]": lambda m: generate(m, torch.ones(2).long(), 3),
        r"prompts: expected \[B,N\] \(2 dimensions\); got shape \[3\]": lambda m: generate(m, np.ones(3, int), 3),
        "max_new_tokens: expected at most max_len - longest prompt = 64 - 60; got 5": lambda m: generate(
            m, [[1] * 60], 5
        ),
        "max_new_tokens: expected an int >= 0": lambda m: generate(m, [[1]], -1),
        "temperature: expected a number >= 0": lambda m: generate(m, [[1]], 1, temperature=-1),
        r"top_p: expected a probability in \(0, 1\]": lambda m: generate(m, [[1]], 1, top_p=0.0),
        "stop_token: expected an int <= 36": lambda m: generate(m, [[1]], 1, stop_token=37),
        r"retrieve's neighbours: expected \[n,K,R\] \(3 dimensions\)": retrieving(5, lambda n: n[0]),
        r"retrieve's neighbours: expected \[n,K,R\] with n=2; got n=1": retrieving(9, lambda n: n[:1]),
        "retrieve's neighbours: expected token ids": retrieving(5, lambda n: n + 37),
        r"retrieve's mask: expected \[n,K\]": retrieving(5, same, lambda m: m[:, :, :2]),
    },
    TypeError: {
        r"prompts\[0\]: expected a sequence of int token ids.*\[1\.0\]": lambda m: generate(m, [[1.0]], 3),
        r"prompts\[0\]: expected torch.int64": lambda m: generate(m, torch.ones(1, 3), 3),
        r"prompts\[0\]: expected a sequence of int token ids.*array": lambda m: generate(m, [np.ones(3)], 3),
        "prompts: expected int64": lambda m: generate(m, "abc", 3),
        "retrieve: expected a function": lambda m: generate(m, [[1]], 1, retrieve=3),
        "retrieve: expected it to return": lambda m: generate(m, [[1] * 5], 1, retrieve=lambda c: retrieve(c)[0]),
        "retrieve's neighbours: expected torch.int64": retrieving(5, lambda n: n.int()),
        "retrieve's mask: expected torch.bool": retrieving(5, same, lambda m: m.int()),
    },
}


@pytest.mark.parametrize("error, message", [(error, message) for error in REFUSED for message in REFUSED[error]])
def test_refuses(error, message):
    with pytest.raises(error, match=message):
        REFUSED[error][message](tiny.model())


def test_refuses_another_number_of_neighbours_later():
    calls = []

    def shrinking(chunks):
        calls.append(len(chunks))
        neighbours, mask = retrieve(chunks)
        return neighbours[:, : 3 - len(calls)], mask[:, : 3 - len(calls)]

    with pytest.raises(ValueError, match=r"retrieve's neighbours: expected \[n,K,R\] with K=2; got K=1"):
        generate(tiny.model(), prompts(5), 8, retrieve=shrinking)


def test_a_baseline_refuses_to_retrieve():
    with pytest.raises(ValueError, match="retrieve: expected None for a model without retrieval"):
        generate(tiny.model(cca_layers=()), [[1]], 3, retrieve=retrieve)


def test_a_model_that_retrieves_warns_when_no_retrieve_is_given():
    model = tiny.model()
    with pytest.warns(UserWarning, match="retrieve: expected a function, or None to decode without retrieval"):
        got = generate(model, prompts(5), 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        want = generate(model, prompts(5), 8, retrieve=None)
        generate(tiny.model(cca_layers=()), [[1]], 3)
    assert all(torch.equal(one, other) for one, other in zip(got, want))
