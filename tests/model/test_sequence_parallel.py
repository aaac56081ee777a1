"""Ranges of a sequence on 2 and 4 processes: logits, losses and gradients of one process, and the stated bytes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import retro_kernels as rk
from retro_model import training
from retro_model.parallel import Line, SequencePart, gathered_attention
from retro_model.training import Batch
from tests import processes
from tests.model import tiny, toys

pytestmark = toys.needs_gloo

B, N, M, K, R = 2, 32, 4, 2, 6


def batch(device="cpu") -> Batch:
    tokens, neighbours, mask = tiny.inputs(B=B, N=N, M=M, K=K, R=R)
    real = torch.ones(B, N, dtype=torch.bool)
    real[1, -3:] = False
    return Batch(tokens, real, neighbours, mask).to(device)


def outcome(model, part=None):
    """Return logits, the loss of every token and every gradient; the loss is the mean over all real tokens of all
    ranges.
    """
    whole = batch(next(model.parameters()).device)
    mine = whole if part is None else part.split(whole)
    logits = model(**mine.inputs)
    loss = model(**mine.inputs, loss_mask=mine.real)
    (loss.total / whole.counted.sum()).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    return logits.detach(), loss.losses, grads


def worker(rank, checkpoint, shared):
    device = processes.device(rank)
    part = SequencePart()
    logits, losses, grads = outcome(tiny.model(dtype=torch.float64, checkpoint=checkpoint, **shared).to(device), part)
    for grad in grads.values():
        dist.all_reduce(grad)
    results = [torch.cat(list(part.line.gather("test", t)), 1).cpu() for t in (logits, losses)]
    sent = {k: v for k, v in part.line.sent.items() if k != "test"}
    every = [None] * part.line.size
    dist.all_gather_object(every, sent)
    return [t.numpy() for t in results], {k: g.cpu().numpy() for k, g in grads.items()}, every


SHARED = {"encoder_d_model": 24, "share_embeddings": True}


CASES = [(2, False, {}), (2, False, {"encoder_cross_layers": ()}), (4, False, {}), (4, True, SHARED)]


def all_cases(rank):
    """Each group of processes runs all its cases, because starting it takes seconds."""
    count = dist.get_world_size()
    results = [worker(rank, *case[1:]) for case in CASES if case[0] == count]
    return results, packed(rank) if count == 2 else {kind: mixed(rank, kind) for kind in ("ddp", "fsdp2")}


@pytest.fixture(scope="module")
def ran():
    return {count: processes.several(count, all_cases) for count in (2, 4)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{bool(case[2])}")
def test_equals_one_process(case, ran):
    count, checkpoint, changes = case
    (logits, losses), grads, sent = ran[count][0][[c for c in CASES if c[0] == count].index(case)]
    want_logits, want_losses, want_grads = outcome(tiny.model(dtype=torch.float64, **changes))
    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(torch.from_numpy(logits), want_logits, **close)
    torch.testing.assert_close(torch.from_numpy(losses)[:, :-1], want_losses, **close)
    assert want_grads.keys() == grads.keys() and all(
        g.abs().max() > 0 for n, g in want_grads.items() if "chunk_norm" not in n
    )
    for name, want in want_grads.items():
        torch.testing.assert_close(torch.from_numpy(grads[name]), want, msg=name, **close)
    if not checkpoint:
        for rank, bytes_ in enumerate(sent):
            assert bytes_ == stated(rank, count, conditioned=changes.get("encoder_cross_layers") != ())


def stated(rank, count, conditioned) -> dict:
    """Return the bytes of two forward passes and one backward pass, by `SequencePart`'s formulas."""
    config, last = tiny.config(), rank == count - 1
    keys = B * N // count * 2 * config.num_heads * config.head_dim * 8 * config.num_layers  # one range, all layers
    sent = {"keys and values": 3 * (count - 1) * keys}
    state = B * M * config.d_model * 8
    border = {"neighbours of the chunk before": 2 * (B * K * R * 8 + B * K * R), "state of the chunk before": 2 * state}
    forward = {name: size * (not last) for name, size in border.items()}
    backward = state * (rank > 0) * conditioned
    sent |= {name: size + backward * name.startswith("state") for name, size in forward.items()}
    sent["token after the range"] = 2 * B * 8 * (rank > 0)
    return {name: size for name, size in sent.items()}


def packed(rank):
    """Documents packed into one sequence, against the whole, with gradients."""
    line = Line()
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 12, 4, 16), (2, 12, 2, 16), (2, 12, 2, 16), (4, 12, 16), (4, 16)]  # query, key, value, table, bias
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    segment = torch.tensor([[0] * 2 + [1] * 7 + [2] * 3, [0] * 7 + [1] * 5])
    upstream = torch.randn(2, 12, 4, 16, generator=generator, dtype=torch.float64)
    device = processes.device(rank)
    inputs = [t.to(device).requires_grad_() for t in drawn]
    segment, upstream = segment.to(device), upstream.to(device)

    def of(whole):
        q, k, v, t, u = inputs
        biases = {"content_bias": u, "position_bias": u}
        if whole:
            segments = {"query_segment": segment, "key_segment": segment}
            out = rk.relative_attention(q, k, v, rel_key=t, rel_start=0, causal=True, **segments, **biases)
            return out, torch.autograd.grad(out, inputs, upstream)
        mine = slice(rank * 12 // line.size, (rank + 1) * 12 // line.size)
        own = (x[:, mine] for x in (q, k, v))
        out = gathered_attention(line, *own, t[:, : mine.stop], segment=segment[:, mine], **biases)
        grads = torch.autograd.grad(out, inputs, upstream[:, mine])
        for grad in grads:
            dist.all_reduce(grad)
        return torch.cat(list(line.gather("test", out.detach())), 1), grads

    (want, want_grads), (out, grads) = of(whole=True), of(whole=False)
    torch.testing.assert_close(out, want)
    for a, b in zip(grads, want_grads):
        torch.testing.assert_close(a, b)
    part = SequencePart()
    with pytest.raises(ValueError, match="tokens: expected a range of whole chunks"):
        tiny.model().to(device)(torch.zeros(1, 6, dtype=torch.int64, device=device), part=part)
    with pytest.raises(ValueError, match="batch: expected tokens and chunks that 2"):
        part.split(Batch(torch.zeros(1, 5, dtype=torch.int64), torch.ones(1, 5, dtype=torch.bool)))
    return "equal"


def test_packed_documents_and_refusals(ran):
    assert ran[2][1] == "equal"


FEW = {"num_layers": 2, "cca_layers": (2,), "encoder_layers": 1}
SETTINGS = training.Settings(steps=2, warmup_steps=0, max_lr=0.3, clip=0.5)


def trained(model, parts, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return [training.train_step(model, optimizer, parts, SETTINGS, step) for step in range(steps)]


def mixed(rank, kind):
    """Each pair of processes takes half of the batch; each of its processes takes half of every sequence."""
    from torch.distributed.device_mesh import init_device_mesh

    device = processes.device(rank)
    mesh = init_device_mesh(device.split(":")[0], (2, 2), mesh_dim_names=("data", "sequence"))
    part, row = SequencePart(mesh["sequence"]), mesh["data"].get_local_rank()
    model = tiny.model(dtype=torch.float64, **FEW).to(device)
    if kind == "fsdp2":
        training.shard(model, mesh[("data", "sequence")]._flatten())
    else:
        model = nn.parallel.DistributedDataParallel(model)
    whole = batch(device)
    mine = Batch(*(t[row : row + 1] for t in (whole.tokens, whole.real, whole.neighbours, whole.neighbour_mask)))
    return trained(model, [part.split(mine)])


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_steps_with_data_parallelism_equal_one_process(kind, ran):
    got, want = ran[4][1][kind], trained(tiny.model(dtype=torch.float64, **FEW), [batch()])
    toys.assert_same_steps(got, want)
