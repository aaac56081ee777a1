"""Offsets past 2**31 elements: one dimension of every tensor has a stride at which an int32 product wraps around.

The tensors are views into one buffer whose untouched pages cost no memory on a CPU. A wrapped offset lands in the
buffer's first half, which no tensor uses.
"""

import functools
import mmap

import pytest
import torch
from torch import Tensor

import retro_kernels as rk
from retro_kernels.core import dispatch
from retro_kernels.testing import inputs
from tests.conftest import fast_backends
from tests.ops.calls import floats, leaves, outputs

FAR = 2**31  # elements, beyond an int32
MAP_NORESERVE = 0x4000  # of Linux; the mmap module names it from Python 3.13 on
APART = 2**23  # bytes between two tensors of a call in the buffer

F16 = {"dtype": torch.float16}
INPUTS = {
    "chunked_cross_attention": functools.partial(
        inputs.cross_attention, 1, **F16, gate=True, mask="token", B=1, N=7, M=4, K=1, R=6, H=1, E=16
    ),
    "relative_attention": functools.partial(
        inputs.self_attention, 1, **F16, causal=True, key_mask=True, segments=True, B=1, N=9, H=1, E=16
    ),
    "relative_logits": functools.partial(inputs.relative_logits, 1, **F16, B=1, H=1),
    "topk_chunks": functools.partial(inputs.topk, 1, **F16, docs=True, mask=True, B=1, Q=8, S=24),
    "leaky_average": functools.partial(inputs.leaky, 1, **F16, B=1, H=1, D=16),
}
#: name -> sizes of the call: at least three indices along the far dimension
SIZES = {
    "batch": dict(B=3),
    "head": dict(H=3),
    "row": {},
    "gradient": dict(N=3, query_start=3),
    "neighbour": dict(K=3),
    "chunk": dict(N=14),
}
HEADS = dict(query=2, rel_key=0, rel_query=2, content_bias=0, position_bias=0, out=2, lse=1)
#: name -> op -> name of a tensor -> the far dimension
DIMENSIONS = {
    "batch": {},
    "head": {
        "chunked_cross_attention": HEADS | dict(key=4, value=4),
        "relative_attention": HEADS | dict(key=2, value=2),
        "relative_logits": dict(query=2, rel_key=0, position_bias=0, out=1),
        "leaky_average": dict(x=2, decay=0, initial=1, out=2),
    },
    "row": {
        "relative_attention": dict(query=1, rel_query=1, out=1, lse=2),
        "relative_logits": dict(query=1, out=2),
        "topk_chunks": dict(query=1, key=1, query_doc=1, key_doc=1, key_mask=1),
        "leaky_average": dict(x=1, out=1),
    },
    "neighbour": {"chunked_cross_attention": dict(key=2, value=2, neighbour_mask=2, neighbour_gate=2)},
    "chunk": {"chunked_cross_attention": dict(key=1, value=1, neighbour_mask=1, neighbour_gate=1)},
}
#: rows of a chunk: the gradient's alone, because Triton refuses such inputs
DIMENSIONS["gradient"] = {"chunked_cross_attention": dict(out=1)}
CASES = [
    (op, name, backend) for name, ops in DIMENSIONS.items() for op in ops or INPUTS for backend in fast_backends(op)
]


@functools.cache
def buffer(device: str) -> torch.UntypedStorage:
    """16 bytes for each of FAR elements: 8 for the widest type, and 8 for offsets that wrap."""
    size = 2 * 8 * FAR + 64 * APART
    if device == "cpu":  # a mapping without reserved memory
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        return torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
    return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()


def far(tensor: Tensor, dimension: int, number: int) -> Tensor:
    """Return the same values with `dimension` so far apart that its last index is more than FAR elements from its
    first. number: index of the tensor in its call.
    """
    strides = list(torch.empty(tensor.shape, device="meta").stride())
    # keeps 16-byte alignment and fits an int32
    strides[dimension] = -(-FAR // (tensor.shape[dimension] - 1) // 16) * 16
    first = (8 * FAR + number * APART) // tensor.element_size()
    view = tensor.new_empty(0).set_(buffer(tensor.device.type), first, tensor.shape, strides)
    view.copy_(tensor)
    return view


def results(op: str, kw: dict, backend: str, place) -> list[Tensor]:
    """Return outputs and gradients; `place(name, tensor)` places an input, or the gradient of an output."""
    placed = {name: place(name, v).detach() if isinstance(v, Tensor) else v for name, v in kw.items()}
    for name in floats(placed):
        placed[name].requires_grad_()
    outs = outputs(op, placed, backend, lse=True)
    differentiable = [out for out in outs if out.requires_grad]
    g = inputs.generator(2)
    grads = [inputs.randn(g, *out.shape, dtype=out.dtype).to(out.device) for out in differentiable]
    finite = [torch.where(out.isfinite(), grad, 0) for out, grad in zip(differentiable, grads)]
    grads = [place(name, grad) for name, grad in zip(("out", "lse"), finite)]
    return [*outs, *torch.autograd.grad(differentiable, list(leaves(placed).values()), grads)]


@pytest.mark.parametrize("op, name, backend", CASES)
def test_offsets_past_32_bits(op, name, backend):
    assert op in dispatch.OPS
    dimensions = DIMENSIONS[name].get(op)
    placed: list[str] = []

    def place(which: str, tensor: Tensor) -> Tensor:
        batched = dimensions is None and tensor.dim() > 2 and which != "rel_key"
        dimension = 0 if batched else (dimensions or {}).get(which)
        placed.append(which)
        return tensor if dimension is None else far(tensor, dimension, len(placed))

    kw = INPUTS[op](**SIZES[name])
    if name == "gradient":
        kw.pop("neighbour_mask", None)  # with one the gradient is copied
    near = results(op, kw, backend, lambda which, tensor: tensor)
    for mine, theirs in zip(results(op, kw, backend, place), near, strict=True):
        assert torch.equal(mine, theirs)
    assert dimensions is None or set(dimensions) <= set(placed)


@pytest.mark.parametrize(
    "op, name, dimension",
    [
        ("chunked_cross_attention", "key", 3),
        ("chunked_cross_attention", "rel_key", 1),
        ("relative_attention", "value", 1),
        ("relative_attention", "key_mask", 1),
        ("relative_logits", "rel_key", 1),
    ],
)
def test_triton_refuses_rows_that_its_offsets_do_not_reach(op, name, dimension):
    if "triton" not in fast_backends(op):
        pytest.skip("Triton cannot run here")
    kw = INPUTS[op]()
    kw[name] = far(kw[name], dimension, 1)
    with pytest.raises(ValueError, match=rf"{name}: \d+ rows, \d+ elements apart, span 2\*\*31 elements or more"):
        getattr(rk, op)(**kw, backend="triton")
