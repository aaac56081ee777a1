"""Decode steps as graphs, on a stand-in for capturing: they use only fixed memory, and replays give plain decoding's
tokens.
"""

from typing import ClassVar

import pytest
import torch

import retro_kernels as rk
from retro_model.generation import captured, generate
from tests.conftest import COMPILED, INTERPRETER
from tests.model import tiny
from tests.model.recorded import Recorded
from tests.model.test_generation import prompts, retrieve


class Counted(Recorded):
    """Counts the replays of each graph."""

    made: ClassVar[list] = []

    def __init__(self, run, device):
        super().__init__(run, device)
        self.replays = 0
        self.made.append(self)

    def replay(self):
        self.replays += 1
        return super().replay()


@pytest.fixture
def stand_in(monkeypatch):
    """Return the list of graphs. The host reads ids on a CPU only."""
    monkeypatch.setattr(captured, "check", lambda model, device: None)
    monkeypatch.setattr(captured.Captured, "graph", Counted)
    monkeypatch.setattr("retro_model.base.checks.token_range", lambda *arguments: None)
    monkeypatch.setattr(Counted, "made", [])
    return Counted.made


def in_vocabulary(model, *lengths):
    return [[token % model.config.vocab_size for token in row] for row in prompts(*lengths)]


#: model, prompts' lengths, tokens, options, number of graphs
CASES = {
    "retro": (lambda: tiny.model(dtype=torch.float64), (9, 9), 30, {"retrieve": retrieve}, 2),
    "retro, ragged": (lambda: tiny.model(dtype=torch.float64), (3, 9, 6, 1), 30, {"retrieve": retrieve}, 2),
    "retro, stops": (lambda: tiny.model(), (8, 5), 30, {"retrieve": retrieve, "stop_token": 3}, 2),
    "retro, off": (lambda: tiny.model(dtype=torch.float64), (3, 5), 20, {}, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_replayed_steps_give_the_plain_tokens(name, stand_in):
    make, lengths, count, options, ways = CASES[name]
    model = make()
    rows = in_vocabulary(model, *lengths)
    want = generate(model, rows, count, **options)
    got = generate(model, rows, count, cuda_graph=True, **options)
    assert [row.tolist() for row in got] == [row.tolist() for row in want]
    assert len(stand_in) >= ways and all(graph.replays >= 2 for graph in stand_in[:ways])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    make, lengths, count, options, _ = CASES[name]
    model = make().float().cuda()
    rows = in_vocabulary(model, *lengths)
    if "retrieve" in options:
        options = options | {"retrieve": lambda chunks: retrieve(chunks.cpu())}
    got, want = (generate(model, rows, count, cuda_graph=graph, **options) for graph in (True, False))
    assert [row.tolist() for row in got] == [row.tolist() for row in want]


def test_what_a_graph_cannot_hold_is_refused():
    x = torch.arange(3.0)
    for bad in (lambda: x.sum().item(), lambda: x[x > 1], lambda: x + torch.tensor([1.0, 2.0, 3.0])):
        with pytest.raises(RuntimeError, match="no graph can hold it"):
            Recorded(bad, x.device)
    held = torch.zeros(3)
    graph = Recorded(lambda: held.add_(x), x.device)
    assert (held == 0).all()
    graph.replay()
    x += 1
    assert torch.equal(graph.replay(), torch.tensor([1.0, 3.0, 5.0])) and torch.equal(held, graph.result)


def test_where_there_is_no_graph_to_be_had():
    with pytest.raises(ValueError, match="cuda_graph: expected a model on a CUDA device; got one on cpu"):
        generate(tiny.model(), [[1, 2]], 4, cuda_graph=True)
    with pytest.raises(TypeError, match="cuda_graph: expected a bool"):
        generate(tiny.model(), [[1, 2]], 4, cuda_graph=1)
    with pytest.raises(ValueError, match="cuda_graph: expected False for a model without a decode_step"):
        captured.check(torch.nn.Linear(2, 2), torch.device("cuda"))
    model = tiny.model()
    cache = model.make_cache(1, 3)
    model.last_logits(torch.tensor([[1, 2, 3]]), cache=cache)
    with pytest.raises(ValueError, match="cache: expected room for a token; got 3 of 3 columns filled"):
        model.decode_step(cache).begin()


@pytest.mark.skipif(INTERPRETER or COMPILED, reason="launches are replaced in this process")
@pytest.mark.nightly
def test_compiled_steps_launch_the_same_on_the_same_memory(stand_in, monkeypatch):
    """For sm_90, emulated: plain and replayed tokens agree, and every replay has the same launches."""
    pytest.importorskip("triton")
    from tests.emulating import emulating

    monkeypatch.setattr(captured, "WARM_RUNS", 1)
    model, log, steps = tiny.model(dtype=torch.float32, num_layers=2, cca_layers=(2,)), [], []
    rows = in_vocabulary(model, 5)
    with emulating(90, checks=False, log=log), rk.use_backend("triton"):
        plain = generate(model, rows, 9, retrieve=retrieve)
        assert log
        replay = Counted.replay

        def noted(graph):
            log.clear()
            result = replay(graph)
            steps.append((id(graph), [launched(launch, graph) for launch in log]))
            return result

        Counted.replay = noted
        try:
            got = generate(model, rows, 9, retrieve=retrieve, cuda_graph=True)
        finally:
            Counted.replay = replay
    assert [r.tolist() for r in got] == [r.tolist() for r in plain]
    assert steps and all(step for _, step in steps)
    first = dict(reversed(steps))
    assert all(step == first[graph] for graph, step in steps) and len(steps) > len(first)


def launched(launch, graph) -> tuple:
    """Return a launch's kernel, grid and numbers, and the addresses of tensors that existed before the graph."""
    values = {
        name: (value.data_ptr() if value.untyped_storage().data_ptr() in graph._found else tuple(value.shape))
        if isinstance(value, torch.Tensor)
        else value
        for name, value in launch.arguments.items()
    }
    return launch.name, launch.grid, values
