"""Heads divided among processes: a model, its encoder and single layers equal the whole ones, with
gradients and FSDP2.
"""

import re

import pytest
import torch
from torch import nn

from retro_model import checkpoint, training
from retro_model.layers import ChunkedCrossAttention, FeedForward, RelativeAttention, RotaryAttention, rotation
from retro_model.parallel import SequencePart, parallelize
from retro_model.training import Batch
from tests import processes
from tests.model import tiny, toys

pytestmark = toys.needs_gloo

SIZES = {"num_heads": 4, "encoder_heads": 2, "num_layers": 2, "cca_layers": (2,), "encoder_layers": 1}
SETTINGS = training.Settings(steps=2, warmup_steps=0, max_lr=0.01, clip=0.5)


def whole_batch(device="cpu") -> Batch:
    tokens, neighbours, mask = tiny.inputs(N=16)
    return Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), neighbours, mask).to(device)


def layers() -> dict[str, nn.Module]:
    torch.manual_seed(3)
    options = {"num_kv_heads": 2, "bias": True, "dtype": torch.float64}
    made = {
        "attention": RelativeAttention(24, 4, 16, causal=True, **options),
        "cca": ChunkedCrossAttention(24, 4, 16, chunk_len=4, context_dim=20, **options),
        "feed_forward": FeedForward(24, 40, bias=True, dtype=torch.float64),
        "gated": FeedForward(24, 40, gated=True, dtype=torch.float64),
        "rotary": RotaryAttention(64, 4, null_slot=True, dtype=torch.float64),
    }
    for layer in made.values():
        for name, p in layer.named_parameters():
            if name.endswith("bias") or name.startswith("null"):
                nn.init.normal_(p)
    return made


def updates(made: dict[str, nn.Module], device="cpu") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    x, encoded = (
        torch.randn(s, generator=generator, dtype=torch.float64).to(device) for s in ((2, 11, 24), (2, 2, 2, 6, 20))
    )
    wide = torch.linspace(-1, 1, 2 * 11 * 64, dtype=torch.float64, device=device).sin().view(2, 11, 64)
    turn = rotation(torch.arange(11, device=device), 16, torch.float64)
    inputs = {name: x.clone().requires_grad_() for name in made} | {"rotary": wide.requires_grad_()}
    calls = {"cca": lambda layer, x: layer(x, encoded), "rotary": lambda layer, x: layer(x, turn, causal=True)}
    found = {name: calls.get(name, lambda layer, x: layer(x))(layer, inputs[name]) for name, layer in made.items()}
    return found | {
        f"{name} gradient": torch.autograd.grad(y.sum(), inputs[name], retain_graph=True)[0]
        for name, y in found.items()
    }


def full(t: torch.Tensor) -> torch.Tensor:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().cpu()


def outcome(model):
    batch = whole_batch(next(model.parameters()).device)
    logits = model(**batch.inputs)
    model(**batch.inputs, loss_mask=batch.real).total.backward()
    return full(logits), {name: full(p.grad) for name, p in model.named_parameters()}


def trained(model, parts, resume=None):
    optimizer = training.make_optimizer(model, SETTINGS)
    first = 0 if resume is None else checkpoint.load(resume, model, optimizer)["step"]
    return [training.train_step(model, optimizer, parts, SETTINGS, step) for step in range(first, first + 2)], optimizer


def of_two(rank, folder):
    from torch.distributed.device_mesh import init_device_mesh

    device = processes.device(rank)
    mesh = init_device_mesh(device.split(":")[0], (2,))
    made = {name: parallelize(layer.to(device), mesh) for name, layer in layers().items()}
    encoder = parallelize(tiny.model(dtype=torch.float64, **SIZES).encoder.to(device), mesh)
    batch = whole_batch(device)
    chunks = torch.linspace(-1, 1, 2 * 4 * 4 * 24, dtype=torch.float64, device=device).view(2, 4, 4, 24)
    encoded = encoder(batch.neighbours, chunks, neighbour_mask=batch.neighbour_mask)
    model = parallelize(tiny.model(dtype=torch.float64, **SIZES).to(device), mesh)
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    with pytest.raises(
        ValueError, match=r"layers.0.attention: expected num_heads and num_kv_heads that 2 processes divide; got 3, 3"
    ):
        parallelize(tiny.model(num_heads=3).to(device), mesh)
    logits, grads = outcome(model)
    simple = {name: full(t).numpy() for name, t in updates(made, device).items()}
    resumed = training.shard(tiny.model(seed=2, dtype=torch.float64, **SIZES).to(device), mesh)
    whole = whole_batch(device)
    half = Batch(*(t[rank : rank + 1] for t in (whole.tokens, whole.real, whole.neighbours, whole.neighbour_mask)))
    history = trained(resumed, [half], resume=folder)[0]
    return simple, full(encoded).numpy(), logits.numpy(), {n: g.numpy() for n, g in grads.items()}, held, history


def of_four(rank, folder):
    """Two halves of the batch on two pairs of processes; then halves of the sequence instead."""
    from torch.distributed.device_mesh import init_device_mesh

    device = processes.device(rank)
    mesh = init_device_mesh(device.split(":")[0], (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize(tiny.model(dtype=torch.float64, **SIZES).to(device), mesh["tensor"])
    training.shard(model, mesh["data"])
    row, whole = mesh["data"].get_local_rank(), whole_batch(device)
    mine = Batch(*(t[row : row + 1] for t in (whole.tokens, whole.real, whole.neighbours, whole.neighbour_mask)))
    history, optimizer = trained(model, [mine])
    checkpoint.save(folder, model, optimizer, step=1)
    torch.manual_seed(rank)
    checkpoint.save(folder, model, optimizer, step=2, position=4, extra={"note": "of four"})
    drawn = torch.rand(3)
    checkpoint.load(folder, model, optimizer)
    assert torch.equal(torch.rand(3), drawn)  # every generator continues
    part = SequencePart(mesh["data"])
    model = parallelize(tiny.model(dtype=torch.float64, **SIZES).to(device), mesh["tensor"])
    logits = model(**part.split(whole).inputs)
    return history, torch.cat(list(part.line.gather("test", logits.detach())), 1).cpu().numpy()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensor") / "saved"
    four = processes.several(4, of_four, str(folder))
    return processes.several(2, of_two, str(folder)), four, folder


def test_layers_and_the_encoder_equal_the_whole_ones(ran):
    simple, encoded, *_ = ran[0]
    for name, want in updates(layers()).items():
        torch.testing.assert_close(torch.from_numpy(simple[name]), want.detach(), msg=name)
    batch = whole_batch()
    chunks = torch.linspace(-1, 1, 2 * 4 * 4 * 24, dtype=torch.float64).view(2, 4, 4, 24)
    want = tiny.model(dtype=torch.float64, **SIZES).encoder(
        batch.neighbours, chunks, neighbour_mask=batch.neighbour_mask
    )
    torch.testing.assert_close(torch.from_numpy(encoded), want.detach())


def test_a_model_equals_the_whole_one(ran):
    *_, logits, grads, held, _ = ran[0]
    model = tiny.model(dtype=torch.float64, **SIZES)
    want, want_grads = outcome(model)
    torch.testing.assert_close(torch.from_numpy(logits), want)
    assert grads.keys() == want_grads.keys()
    for name, grad in want_grads.items():
        torch.testing.assert_close(torch.from_numpy(grads[name]), grad, msg=name)
    divided = re.compile(r"(attention|cca|cross|feed_forward)\.")
    divided = sum(p.numel() for name, p in model.named_parameters() if divided.search(name))
    assert held == sum(p.numel() for p in model.parameters()) - divided // 2


def test_with_fsdp2_and_with_ranges_of_the_sequence(ran):
    (history, logits), folder = ran[1:]
    model = tiny.model(dtype=torch.float64, **SIZES)
    torch.testing.assert_close(torch.from_numpy(logits), model(**whole_batch().inputs).detach())
    want, _ = trained(model, [whole_batch()])
    toys.assert_same_steps(history, want, 1e-6)  # tokens count once, though both processes of a pair read them
    restored = tiny.model(seed=1, dtype=torch.float64, **SIZES)
    checkpoint.load(folder, restored)  # the checkpoint of four processes, in one
    for (name, p), q in zip(model.named_parameters(), restored.parameters(), strict=True):
        torch.testing.assert_close(q, p, msg=name, rtol=1e-5, atol=1e-7)


def test_shards_of_four_processes_are_resumed_by_two_and_by_one(ran):
    history, _, folder = ran[0][-1], *ran[1:]
    model = tiny.model(dtype=torch.float64, **SIZES)
    optimizer = training.make_optimizer(model, SETTINGS)
    want = [training.train_step(model, optimizer, [whole_batch()], SETTINGS, step) for step in range(4)][2:]
    alone, _ = trained(tiny.model(seed=3, dtype=torch.float64, **SIZES), [whole_batch()], resume=folder)
    for got in (history, alone):
        toys.assert_same_steps(got, want)
    state = checkpoint.read_state(folder)
    assert (state["step"], state["position"], state["extra"], state["processes"]) == (2, 4, {"note": "of four"}, 4)
    shards = list((folder / state["shards"]).glob("*.safetensors"))
    sizes = [s.stat().st_size for s in shards]
    assert len(shards) == 4 and max(sizes) < 0.5 * sum(sizes)  # no process wrote the whole
    assert {p.name for p in folder.iterdir()} == {state["shards"], "state.json", ".lock"}
