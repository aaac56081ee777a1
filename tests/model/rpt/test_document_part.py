"""Documents split over two processes: logits, losses, pairs and gradients of one process, and the stated bytes."""

import pytest
import torch
import torch.distributed as dist

from retro_model.parallel import DocumentPart
from retro_model.rpt import OWN, lambda_rank
from retro_model.rpt.supervision import Supervision
from retro_model.training import rpt
from tests import processes
from tests.conftest import INTERPRETER
from tests.model.rpt import tiny
from tests.model.rpt.test_distributed import LESSONS, SETTINGS

pytestmark = pytest.mark.skipif(
    INTERPRETER or not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
)

B, N, M = 2, 48, 4
CASES = [{}, {"window": "sliding", "null_slot": True}, {"retriever": False}]


def data(changes: dict):
    """Documents, candidates and neighbours by the numbers of whole documents; the retriever chooses some of them."""
    g, number = torch.Generator().manual_seed(0), torch.arange(N // M)
    candidates = torch.stack([(number - 2 - c).clamp(min=-1) for c in range(3)], 1).expand(B, -1, -1).contiguous()
    scores = torch.randn(candidates.shape, generator=g).masked_fill(candidates < 0, -torch.inf)
    lessons = Supervision(candidates, scores)
    index = lessons.teacher(2)
    if changes.get("retriever", True):
        index[0] = OWN
    real = torch.rand(B, N, generator=g) < 0.9
    return tiny.tokens(N, batch=B), lessons, index, real


def outcome(changes: dict, part: DocumentPart | None = None):
    """Return logits, the index, and the gradients of both losses, each the mean over all processes."""
    model, (tokens, lessons, index, real) = tiny.model(**changes), data(changes)
    counted, options = real[:, 1:].sum(), {}
    if part is not None:
        (tokens, lessons), (index, _), (real, _) = part.split(tokens, lessons), part.split(index), part.split(real)
        options = {"part": part}
    logits, read = model(tokens, index=index, return_retrieved=True, **options)
    loss, retrieved = model(tokens, index=index, return_retrieved=True, loss_mask=real, **options)
    total = loss.total / counted
    if model.retriever is not None:
        ranking = lambda_rank(retrieved.scores, lessons.dense(retrieved.scores.shape[-1]), 1.0)[0]
        total = total + ranking / 100
    total.backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return logits.detach(), read.index, grads


def worker(rank):
    results, part = [], DocumentPart()
    for changes in CASES:
        part.line.sent.clear()
        logits, index, grads = outcome(changes, part)
        sent = dict(part.line.sent)
        for grad in grads.values():
            dist.all_reduce(grad)
        whole = [torch.cat(list(part.line.gather("test", t)), 1).numpy() for t in (logits, index)]
        results.append((whole, {name: grad.numpy() for name, grad in grads.items()}, sent))
    return results, trained(part)


def trained(part: DocumentPart | None = None):
    """Run three steps of `train_step`, in DDP if the documents are split."""
    model, (tokens, lessons, index, real) = tiny.model(dtype=torch.float32, score_scale=0.2), data({})
    optimizer, options, wrapped = torch.optim.SGD(model.parameters(), lr=0.1), {}, model
    if part is not None:
        (tokens, lessons), (index, _), (real, _) = part.split(tokens, lessons), part.split(index), part.split(real)
        options, wrapped = {"part": part}, torch.nn.parallel.DistributedDataParallel(model)
    return [
        rpt.train_step(
            wrapped, optimizer, tokens, lessons, SETTINGS, LESSONS, step, index=index, loss_mask=real, **options
        )
        for step in range(3)
    ]


@pytest.fixture(scope="module")
def ran():
    return processes.two(worker)


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: str(CASES[i]))
def test_equals_one_process(case, ran):
    (logits, index), grads, _ = ran[0][case]
    want_logits, want_index, want_grads = outcome(CASES[case])
    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(torch.from_numpy(logits), want_logits, **close)
    assert torch.equal(torch.from_numpy(index), want_index) and (want_index >= 0).any()
    assert sum(g.abs().max() > 0 for g in want_grads.values()) > 40
    for name, want in want_grads.items():
        torch.testing.assert_close(
            torch.from_numpy(grads[name]), want, msg=lambda m, name=name: f"{name}: {m}", **close
        )


def test_training_equals_one_process(ran):
    for got, want in zip(ran[1], trained()):
        assert got["pairs"] == want["pairs"] > 20
        for name in ("loss", "retrieval_loss"):
            assert got[name] == pytest.approx(want[name], rel=1e-5)
        assert got["gradient_norm"] == pytest.approx(want["gradient_norm"], rel=1e-4)


def test_bytes_are_those_that_are_stated(ran):
    """Of two forward passes and one backward pass on the first of two processes."""
    sent, d, width, layers = ran[0][0][2], 32, 8, 4
    n, chunks, k = N // 2, N // 2 // M, 2
    assert sent["states of chunks"] == 3 * B * n * d * width and sent["keys of chunks"] == 3 * B * chunks * d * width
    assert sent["keys and values of the gate"] == 3 * B * chunks * k * 2 * d * width
    segment, lead = 8, k * 2 * M * d + k
    assert sent["state of the chunk before"] == 2 * B * width * (layers * segment * 2 * d + lead)


def test_refuses():
    class Alone(DocumentPart):
        def __init__(self):
            pass

    model = tiny.model()
    with pytest.raises(ValueError, match="a multiple of 8 from 8 on; got N=20"):
        model(tiny.tokens(20), part=Alone())
    with pytest.raises(ValueError, match="part: expected None with a cache"):
        model(tiny.tokens(24), part=Alone(), cache=model.make_cache(2))
