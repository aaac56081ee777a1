"""The whole model: the paper's equations in loops, causality, retrieval off, errors."""

import copy

import pytest
import torch

import retro_kernels as rk
from retro_kernels.testing import assert_passes, relative_error, tolerances
from retro_model.retro import Retro
from tests.model import tiny
from tests.model.naive import Naive

VARIANTS = {
    "paper": {},
    "layer 1, R = 2M": {"cca_layers": (1, 3)},
    "encoder crosses twice": {"encoder_cross_layers": (1, 2)},
    "encoder crosses last": {"encoder_cross_layers": (2,)},
    "unconditioned encoder": {"encoder_cross_layers": ()},
    "shared embeddings": {"share_embeddings": True, "encoder_d_model": 24},
    "three-layer encoder": {"encoder_layers": 3},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_equations_in_loops(name):
    model = tiny.model(dtype=torch.float64, **VARIANTS[name])
    R = 8 if "2M" in name else 6
    tokens, neighbours, mask = tiny.inputs(B=1, N=14, R=R, K=3)
    mask[0, 1, 0] = False  # one neighbour missing
    want = torch.from_numpy(Naive(model).logits(tokens[0].tolist(), neighbours[0].tolist(), mask[0].tolist()))
    assert relative_error(model(tokens, neighbours, neighbour_mask=mask)[0], want) < tolerances.FLOOR[torch.float64]


def test_off_equals_the_equations_in_loops():
    model = tiny.model(dtype=torch.float64)
    tokens = tiny.inputs(B=1, N=10)[0]
    want = torch.from_numpy(Naive(model).logits(tokens[0].tolist()))
    assert relative_error(model(tokens)[0], want) < tolerances.FLOOR[torch.float64]


def test_off_equals_neighbours_that_are_all_missing():
    model = tiny.model()
    tokens, neighbours, _ = tiny.inputs()
    off = model(tokens)
    for mask in (torch.zeros(2, 4, 2, dtype=torch.bool), torch.zeros(2, 4, 2, 6, dtype=torch.bool)):
        assert torch.equal(model(tokens, neighbours, neighbour_mask=mask), off)
    baseline = Retro(model.config.baseline()).eval()
    baseline.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(baseline(tokens), off)
    assert not any("cca" in name or "encoder" in name for name in baseline.state_dict())


def test_a_mask_of_neighbours_is_that_mask_on_each_token():
    model = tiny.model()
    tokens, neighbours, mask = tiny.inputs(mask="neighbour")
    assert not mask.all() and mask.any()
    whole = mask.unsqueeze(-1).expand(neighbours.shape)
    assert torch.equal(model(tokens, neighbours, neighbour_mask=mask), model(tokens, neighbours, neighbour_mask=whole))


@pytest.mark.parametrize("N", [1, 3, 4, 7])
def test_short_sequences(N):
    """Fewer than M tokens have no chunk; a prefix has the logits it has in the whole."""
    model = tiny.model(dtype=torch.float64)
    tokens, neighbours, mask = tiny.inputs()
    want = model(tokens, neighbours, neighbour_mask=mask)[:, :N]
    got = model(tokens[:, :N], neighbours[:, : N // 4], neighbour_mask=mask[:, : N // 4])
    assert relative_error(got, want) < tolerances.FLOOR[torch.float64]


@pytest.mark.parametrize("share", [False, True])
def test_gradients_reach_every_parameter(share):
    model = tiny.model(share_embeddings=share, encoder_d_model=24)
    tokens, neighbours, mask = tiny.inputs()
    model(tokens, neighbours, neighbour_mask=mask).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.any(), name


def test_missing_neighbours_give_no_gradient_and_no_nan():
    model = tiny.model()
    tokens, neighbours, mask = tiny.inputs()
    model(tokens, neighbours, neighbour_mask=torch.zeros_like(mask)).square().sum().backward()
    for name, parameter in model.named_parameters():
        if name.startswith("encoder") or ".cca" in name:
            assert not parameter.grad.any(), name
        assert parameter.grad.isfinite().all(), name


def training_step(model: Retro) -> dict[str, torch.Tensor]:
    """Loss and every gradient of next-token prediction."""
    tokens, neighbours, mask = tiny.inputs()
    logits = model(tokens, neighbours, neighbour_mask=mask)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


def test_fused_training_step_equals_the_reference():
    if not rk.backends()["chunked_cross_attention"]["cpu"]:
        pytest.skip("the cpu backend is not built")
    want = training_step(tiny.model(backend="reference", dtype=torch.float64))
    eager = training_step(tiny.model(backend="reference"))
    got = training_step(tiny.model(backend="cpu"))
    for name, value in want.items():
        assert_passes(name, got[name], value, eager[name], torch.float32)


def test_checkpointing_changes_nothing():
    for dropout in (0.0, 0.3):
        results = []
        for checkpoint in (False, True):
            model = tiny.model(checkpoint=checkpoint, dropout=dropout).train()
            torch.manual_seed(5)
            results.append(training_step(model))
        assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_dropout_only_in_training():
    model = tiny.model(dropout=0.5)
    tokens, neighbours, mask = tiny.inputs()
    plain = tiny.model()(tokens, neighbours, neighbour_mask=mask)
    assert torch.equal(model(tokens, neighbours, neighbour_mask=mask), plain)
    model.train()
    drawn = [model(tokens, neighbours, neighbour_mask=mask) for _ in range(2)]
    assert not torch.equal(drawn[0], drawn[1])


def test_compiles_in_one_graph():
    """A step that recomputes activations, and RETRO[OFF]."""
    model = tiny.model(checkpoint=True, num_layers=1, cca_layers=(1,), encoder_layers=1)
    want = training_step(copy.deepcopy(model))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    tokens, neighbours, mask = tiny.inputs()
    got = compiled(tokens, neighbours, neighbour_mask=mask, loss_mask=torch.ones_like(tokens, dtype=torch.bool))
    loss = got.total / tokens[:, 1:].numel()
    loss.backward()
    assert_passes("loss", loss, want["loss"].double(), None, torch.float32)
    for name, parameter in model.named_parameters():
        assert_passes(name, parameter.grad, want[name].double(), want[name], torch.float32)
    with torch.no_grad():
        assert torch.equal(compiled(tokens), model(tokens))


@pytest.mark.nightly
def test_one_graph_serves_other_sizes():
    torch.compiler.reset()
    model = tiny.model(num_layers=1, cca_layers=(1,), encoder_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens, neighbours, mask in (tiny.inputs(), tiny.inputs(N=27, K=3, mask="neighbour")):
        with torch.no_grad():
            got, want = (call(tokens, neighbours, neighbour_mask=mask) for call in (compiled, model))
        assert_passes("logits", got, want.double(), None, torch.float32)


def test_bfloat16_autocast():
    """Residual stream and weight gradients stay float32; the error is bfloat16's, no worse than eager's."""
    tokens, neighbours, mask = tiny.inputs()
    want = tiny.model(dtype=torch.float64)(tokens, neighbours, neighbour_mask=mask)
    outs = []
    for backend in (None, "reference"):
        model = tiny.model(backend=backend)
        with torch.autocast("cpu", torch.bfloat16):
            assert model.layers[0](model.embedding(tokens))[0].dtype == torch.float32
            outs.append(model(tokens, neighbours, neighbour_mask=mask))
        outs[-1].float().square().sum().backward()
        assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())
    assert_passes("logits", outs[0], want, outs[1], torch.bfloat16)


def test_half_precision_weights():
    tokens, neighbours, mask = tiny.inputs()
    want = tiny.model(dtype=torch.float64)(tokens, neighbours, neighbour_mask=mask)
    got = tiny.model(dtype=torch.bfloat16)(tokens, neighbours, neighbour_mask=mask)
    eager = tiny.model(dtype=torch.bfloat16, backend="reference")(tokens, neighbours, neighbour_mask=mask)
    assert_passes("logits", got, want, eager, torch.bfloat16)


def test_built_on_meta_then_given_memory():
    built = []
    for model in (Retro(tiny.config(), device="meta").to_empty(device="cpu"), Retro(tiny.config())):
        torch.manual_seed(3)
        model.reset_parameters()
        built.append(model)
    state = built[1].state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in built[0].state_dict().items())


def test_shared_embeddings_are_one_parameter():
    model = tiny.model(share_embeddings=True, encoder_d_model=24)
    assert model.encoder.embedding is model.embedding
    assert sum(p.shape == (tiny.VOCAB, 24) for p in model.parameters()) == 2  # the embedding and the read-out


REFUSED = {
    ValueError: {
        r"tokens: expected \[B,N\]": lambda t, n, k: (t[0], n, k),
        "tokens: expected token ids from 0 to V-1 = 36; got [0-9]": lambda t, n, k: (t + 36, n, k),
        "tokens: expected token ids from 0 to V-1 = 36; got -": lambda t, n, k: (t - 37, n, k),
        r"tokens: expected N <= 64 \(max_len = 64\); got N=76": lambda t, n, k: (t.repeat(1, 4), None, None),
        r"neighbours: expected \S+ with L = N//chunk_len = 4 .*got L=3": lambda t, n, k: (t, n[:, :3], k[:, :3]),
        r"neighbours: expected \[B,L,K,R\] with B=2; got B=1": lambda t, n, k: (t, n[:1], k[:1]),
        r"neighbours: expected \[B,L,K,R\] \(4 dimensions\)": lambda t, n, k: (t, n[0], k),
        "neighbours: expected token ids from 0 to V-1": lambda t, n, k: (t, n + 37, k),
        r"neighbour_mask: expected \[B,L,K\]=\[2, 4, 2\] or \[B,L,K,R\]": lambda t, n, k: (t, n, k[:, :, :1]),
        "neighbour_mask: expected None where neighbours is None": lambda t, n, k: (t, None, k),
    },
    TypeError: {
        "tokens: expected torch.int64 token ids; got torch.int32": lambda t, n, k: (t.int(), n, k),
        "tokens: expected a torch.Tensor; got list": lambda t, n, k: (t.tolist(), n, k),
        "neighbours: expected torch.int64 token ids": lambda t, n, k: (t, n.float(), k),
        "neighbour_mask: expected torch.bool, True = attend; got torch.int64": lambda t, n, k: (t, n, k.long()),
    },
}


@pytest.mark.parametrize("error, message", [(error, message) for error in REFUSED for message in REFUSED[error]])
def test_refuses(error, message):
    tokens, neighbours, mask = REFUSED[error][message](*tiny.inputs())
    with pytest.raises(error, match=message):
        tiny.model()(tokens, neighbours, neighbour_mask=mask)


def test_a_baseline_refuses_neighbours():
    tokens, neighbours, _ = tiny.inputs()
    with pytest.raises(ValueError, match="neighbours: expected None for a model without retrieval"):
        Retro(tiny.config().baseline())(tokens, neighbours)
