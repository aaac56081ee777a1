"""Bad input of every op, one test per rule: type of the error, named argument, expected and given value."""

import re
import warnings

import numpy as np
import pytest
import torch

import retro_kernels as rk
from retro_kernels.testing import inputs
from tests.ops.calls import BUILDERS
from tests.refusals import refused


def strided(t):
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


NESTED = torch.nested.nested_tensor([torch.zeros(2, 3, 16), torch.zeros(1, 3, 16)], layout=torch.jagged)

#: error -> words of its message -> a change to good arguments
CCA = {
    TypeError: {
        "query_start: expected torch.int64; got torch.float32": dict(query_start=torch.zeros(2)),
        "query: expected a torch.Tensor; got list": dict(query=[1]),
        "query: expected a tensor of one shape; got a nested tensor": dict(query=NESTED),
        "neighbour_mask: expected a tensor of one shape; got a nested tensor": dict(neighbour_mask=NESTED),
        "query_start: expected a tensor of one shape; got a nested tensor": dict(query_start=NESTED),
        "backend: expected None or a str; got ndarray": dict(backend=np.array(["cpu", "reference"])),
        "backend: expected None or a str; got bytes": dict(backend=b"cpu"),
        "query: expected a torch.Tensor; got ndarray": dict(query=np.zeros((2, 19, 4, 16))),
        "scale: expected a number; got ndarray": dict(scale=np.ones(3)),
        "query: expected float32, float16, bfloat16 or float64; got torch.int64": dict(query=lambda t: t.long()),
        "key: expected torch.float32 (the type of query); got torch.float16": dict(key=lambda t: t.half()),
        "chunk_len: expected an int; got float": dict(chunk_len=4.0),
        "chunk_len: expected an int; got bool": dict(chunk_len=True),
        "rel_key: expected torch.float32": dict(rel_key=lambda t: t.double()),
        "rel_start: expected an int; got float": dict(rel_start=0.5),
        "content_bias: expected torch.float32": dict(content_bias=lambda t: t.double()),
        "neighbour_mask: expected torch.bool; got torch.float32": dict(neighbour_mask=torch.ones(2, 4, 2)),
        "neighbour_gate: expected torch.float32": dict(neighbour_gate=torch.ones(2, 4, 2).half()),
        "scale: expected a number; got str": dict(scale="1"),
        "return_lse: expected a bool; got int": dict(return_lse=1),
        "neighbor_mask": dict(neighbor_mask=None),
    },
    ValueError: {
        "query_start: expected [B] with B=2; got B=3": dict(query_start=torch.zeros(3).long()),
        "query_start: expected the device of query, cpu; got meta": dict(
            query_start=torch.zeros(2, device="meta").long()
        ),
        "query: expected [B,N,H,D] (4 dimensions); got shape [19, 4, 16]": dict(query=lambda t: t[0]),
        "query: expected a contiguous last dimension (stride 1); got stride 4": dict(query=strided),
        "key: expected [B,L,K,R,G,D] with D=12; got D=16": dict(query=lambda t: t[..., :12]),
        "key: expected [B,L,K,R,G,D] with B=2; got B=1": dict(key=lambda t: t[:1]),
        "key: expected [B,L,K,R,G,D] with L >= 4 chunks for N=19, chunk_len=4; got L=3": dict(
            key=lambda t: t[:, :3], value=lambda t: t[:, :3]
        ),
        "L >= 7 chunks for N=19, chunk_len=4, query_start=9; got L=4": dict(query_start=9),
        "key: expected the device of query, cpu; got meta": dict(key=lambda t: t.to("meta")),
        "key: expected a strided tensor; got layout torch.sparse_coo": dict(key=lambda t: t.to_sparse()),
        "value: expected [B,L,K,R,G,D] with K=2; got K=1": dict(value=lambda t: t[:, :, :1]),
        "key: expected G key/value heads that divide the H=4": dict(
            key=lambda t: t[..., :3, :], value=lambda t: t[..., :3, :]
        ),
        "chunk_len: expected an int >= 1; got 0": dict(chunk_len=0),
        "query_start: expected an int >= 0; got -1": dict(query_start=-1),
        "rel_key: expected [H or 1,T,E] with H=4; got shape [3, 9, 16]": dict(rel_key=lambda t: t[:3]),
        "with T = chunk_len+R-1 = 9 (all displacements) where rel_start is None; got T=8": dict(
            rel_key=lambda t: t[:, :8]
        ),
        "with T >= 1; got T=0": dict(rel_key=lambda t: t[:, :0], rel_start=0),
        "with E=D=16 where rel_query is None; got E=8": dict(rel_key=lambda t: t[..., :8], position_bias=None),
        "with E from 1 to 256; got E=300": dict(rel_key=torch.zeros(1, 9, 300)),
        "position_bias: expected None without rel_key": dict(rel_key=None),
        "rel_start: expected None without rel_key": dict(rel_key=None, position_bias=None, rel_start=0),
        "rel_query: expected None without rel_key": dict(rel_key=None, position_bias=None, rel_query=torch.zeros(1)),
        "rel_query: expected [B,N,H,E] with E=16; got E=8": dict(rel_query=torch.zeros(2, 19, 4, 8)),
        "content_bias: expected [H,D] with H=4; got H=1": dict(content_bias=lambda t: t[:1]),
        "position_bias: expected [H,E] with E=16; got E=4": dict(position_bias=lambda t: t[:, :4]),
        "neighbour_mask: expected [B,L,K] or [B,L,K,R]; got shape [2, 4]": dict(neighbour_mask=torch.ones(2, 4).bool()),
        "neighbour_mask: expected [B,L,K,R] with R=6; got R=5": dict(neighbour_mask=torch.ones(2, 4, 2, 5).bool()),
        "neighbour_gate: expected [B,L,K] with K=2; got K=1": dict(neighbour_gate=torch.ones(2, 4, 1)),
        "scale: expected a finite number; got nan": dict(scale=float("nan")),
        "scale: expected a finite number; got 1000": dict(scale=10**400),
        f"chunk_len: expected an int <= {2**29}; got {2**80}": dict(chunk_len=2**80),
        f"query_start: expected an int <= {2**29}; got {2**80}": dict(query_start=2**80),
        f"rel_start: expected an int <= {2**29}; got {2**31}": dict(rel_start=2**31),
        f"rel_start: expected an int >= {-(2**29)}; got {-(2**63)}": dict(rel_start=-(2**63)),
        "dropout_p: expected a probability in [0, 1); got 1.0": dict(dropout_p=1.0),
        "dropout_p: expected a probability in [0, 1); got -0.1": dict(dropout_p=-0.1),
        "backend: expected None or one of 'cuda', 'triton', 'cpu', 'reference'; got 'cublas'": dict(backend="cublas"),
    },
}

ATTENTION = {
    TypeError: {
        "query_offset: expected torch.int64; got torch.int32": dict(query_offset=torch.zeros(2).int(), rel_start=0),
        "causal: expected a bool; got int": dict(causal=1),
        "query_offset: expected an int; got float": dict(query_offset=1.0),
        "key_mask: expected torch.bool": dict(key_mask=torch.ones(2, 13)),
        "query_segment: expected torch.int64 or": dict(
            query_segment=torch.zeros(2, 13), key_segment=torch.zeros(2, 13)
        ),
        "key_segment: expected torch.int64 (the type of query_segment); got torch.int32": dict(
            query_segment=torch.zeros(2, 13).long(), key_segment=torch.zeros(2, 13).int()
        ),
    },
    ValueError: {
        "window_block: expected None where window is given; got 4": dict(window=3, window_block=4),
        "window_block: expected an int >= 1; got 0": dict(window_block=0),
        "query_offset: expected [B] with B=2; got B=3": dict(query_offset=torch.zeros(3).long(), rel_start=0),
        "query_offset: expected [B] (1 dimensions); got shape []": dict(query_offset=torch.tensor(3), rel_start=0),
        "rel_start: expected an int where query_offset is a tensor; got None": dict(query_offset=torch.zeros(2).long()),
        "value: expected [B,S,G,D] with S=13; got S=5": dict(value=lambda t: t[:, :5]),
        "causal_gap: expected 0 where causal is False; got 1": dict(causal_gap=1),
        "causal_gap: expected an int >= 0; got -1": dict(causal=True, causal_gap=-1),
        "window: expected an int >= 1; got 0": dict(window=0),
        f"query_offset: expected an int <= {2**29}; got {2**31}": dict(query_offset=2**31),
        "with T = N+S-1 = 25 (all displacements) where rel_start is None; got T=24": dict(rel_key=lambda t: t[:, 1:]),
        "key_mask: expected [B,S] with S=13; got S=12": dict(key_mask=torch.ones(2, 12).bool()),
        "key_segment: expected a tensor where query_segment is given; got None": dict(
            query_segment=torch.zeros(2, 13).long()
        ),
        "query: expected D (the head dimension) to be a multiple of 8 from 16 to 256; got D=20": dict(
            query=torch.zeros(2, 13, 4, 20), key=torch.zeros(2, 13, 4, 20), value=torch.zeros(2, 13, 4, 20)
        ),
        "got D=8": dict(query=torch.zeros(2, 13, 4, 8), key=torch.zeros(2, 13, 4, 8), value=torch.zeros(2, 13, 4, 8)),
    },
}

LOGITS = {
    TypeError: {
        "query_offset: expected an int; got NoneType": dict(query_offset=None),
    },
    ValueError: {
        "key_len: expected an int >= 0; got -1": dict(key_len=-1),
        "with T = N+key_len-1 = 15 (all displacements)": dict(rel_key=lambda t: t[:, 1:]),
        "rel_key: expected [H or 1,T,E] with E=16; got E=8": dict(rel_key=lambda t: t[..., :8]),
        "position_bias: expected [H,E] with H=3; got H=1": dict(position_bias=lambda t: t[:1]),
        f"query_offset: expected an int >= {-(2**29)}; got {-(2**31)}": dict(query_offset=-(2**31)),
        f"key_len: expected an int <= {2**29}; got {2**40}": dict(key_len=2**40),
    },
}

TOPK = {
    TypeError: {
        "metric: expected a str; got ndarray": dict(metric=np.array(["dot", "l2"])),
        "query: expected a tensor of one shape; got a nested tensor": dict(query=NESTED),
        "key: expected torch.float32 (the type of query); got torch.float64": dict(key=lambda t: t.double()),
        "key_mask: expected torch.bool": dict(key_mask=torch.ones(2, 23)),
    },
    ValueError: {
        "k: expected an int >= 1; got 0": dict(k=0),
        "k: expected an int <= 128; got 129": dict(k=129),
        "metric: expected 'dot' or 'l2'; got 'cosine'": dict(metric="cosine"),
        "key: expected [B or 1,S,D] with B=2; got shape [3, 23, 16]": dict(key=torch.zeros(3, 23, 16)),
        "key: expected [B or 1,S,D] with D=16; got D=8": dict(key=lambda t: t[..., :8]),
        "D (the embedding width) from 1 to 4096; got D=4097": dict(
            query=torch.zeros(2, 7, 4097), key=torch.zeros(2, 23, 4097)
        ),
        "key: expected the device of query, cpu; got meta": dict(key=lambda t: t.to("meta")),
        "query_offset: expected 0 where causal_gap is None; got 3": dict(query_offset=3),
        f"query_offset: expected an int <= {2**61}; got {2**63}": dict(causal_gap=0, query_offset=2**63),
        f"causal_gap: expected an int >= {-(2**61)}; got {-(2**63)}": dict(causal_gap=-(2**63)),
        "key_doc: expected a tensor where query_doc is given; got None": dict(query_doc=torch.zeros(2, 7).long()),
        "query_doc: expected a tensor where key_doc is given; got None": dict(key_doc=torch.zeros(2, 23).long()),
        "key_doc: expected [B or 1,S] with S=23; got S=22": dict(
            key_doc=torch.zeros(2, 22).long(), query_doc=torch.zeros(2, 7).long()
        ),
        "key_mask: expected [B or 1,S] with B=2; got shape [3, 23]": dict(key_mask=torch.ones(3, 23).bool()),
    },
}

LEAKY = {
    TypeError: {
        "decay: expected a tensor of one shape; got a nested tensor": dict(decay=NESTED),
        "segment: expected torch.int64 or torch.int32 or": dict(segment=torch.zeros(2, 37)),
        "decay: expected torch.float32; got torch.float16": dict(decay=lambda t: t.half()),
        "initial: expected torch.float32 (the type of x); got torch.float16": dict(initial=lambda t: t.half()),
    },
    ValueError: {
        "segment: expected [B,N] with N=37; got N=36": dict(segment=torch.zeros(2, 36).long()),
        "x: expected [B,N,H,D] (4 dimensions); got shape [37, 3, 5]": dict(x=lambda t: t[0]),
        "decay: expected [H] with H=3; got H=2": dict(decay=lambda t: t[:2]),
        "initial: expected [B,H,D] with B=2; got B=1": dict(initial=lambda t: t[:1]),
    },
}

OUTS, LSES = torch.ones(1, 3, 2, 16), torch.ones(1, 2, 3)
MERGE = {
    TypeError: {
        "outs: expected a sequence of tensors": dict(outs=3),
        "outs[1]: expected torch.float32 (the type of outs[0])": dict(outs=[OUTS, OUTS.half()], lses=[LSES] * 2),
        "lses: expected torch.float32; got torch.float16": dict(outs=[OUTS.half()] * 2, lses=[LSES.half()] * 2),
    },
    ValueError: {
        "outs: expected 2 or more tensors [B,N,H,D]; got 1": dict(outs=[OUTS], lses=[LSES]),
        "outs: expected [P,B,N,H,D] with P >= 2; got P=1": dict(outs=OUTS[None], lses=LSES[None]),
        "outs[1]: expected [B,N,H,D] with N=3; got N=2": dict(outs=[OUTS, OUTS[:, :2]], lses=[LSES] * 2),
        "lses: expected [P,B,H,N] with P=2; got P=3": dict(outs=[OUTS] * 2, lses=[LSES] * 3),
        "lses: expected [P,B,H,N] with H=2; got H=3": dict(outs=[OUTS] * 2, lses=[LSES.mT] * 2),
    },
}

NORM = {
    TypeError: {
        "input: expected a torch.Tensor; got list": dict(input=[1.0]),
        "input: expected float32, float16, bfloat16 or float64; got torch.int64": dict(input=torch.ones(2, 16).long()),
        "weight: expected torch.float32; got torch.float16": dict(weight=torch.zeros(16).half()),
        "eps: expected a number; got str": dict(eps="small"),
    },
    ValueError: {
        "input: expected [...,D] with D=16; got [2, 19, 15]": dict(input=torch.zeros(2, 19, 15)),
        "weight: expected [D] (1 dimensions); got shape [1, 16]": dict(weight=torch.zeros(1, 16)),
        "weight: expected the device of input, cpu; got meta": dict(weight=torch.zeros(16, device="meta")),
        "eps: expected a number >= 0; got -1.0": dict(eps=-1.0),
        "backend: expected None or one of": dict(backend="mkl"),
    },
}

ENTROPY = {
    TypeError: {
        "input: expected a torch.Tensor; got list": dict(input=[1.0]),
        "input: expected float32, float16, bfloat16 or float64; got torch.int64": dict(input=lambda t: t.long()),
        "target: expected torch.int64; got torch.int32": dict(target=lambda t: t.int()),
        "ignore_index: expected an int; got float": dict(ignore_index=-100.0),
    },
    ValueError: {
        "input: expected [T,V] (2 dimensions); got shape [19]": dict(input=torch.zeros(19)),
        "input: expected [T,V] with V >= 1; got V=0": dict(input=torch.zeros(19, 0)),
        "input: expected a contiguous last dimension": dict(input=torch.zeros(33, 19).mT),
        "target: expected [T] with T=19; got T=18": dict(target=lambda t: t[1:]),
        "target: expected 0 to V-1=32 or ignore_index=-100; got 33": dict(target=torch.full((19,), 33)),
        "target: expected 0 to V-1=32 or ignore_index=7; got -100": dict(
            target=torch.full((19,), -100), ignore_index=7
        ),
        "reduction: expected 'none', 'sum' or 'mean'; got 'max'": dict(reduction="max"),
    },
}

TABLES = {
    "chunked_cross_attention": CCA,
    "relative_attention": ATTENTION,
    "relative_logits": LOGITS,
    "topk_chunks": TOPK,
    "leaky_average": LEAKY,
    "merge_attention": MERGE,
    "rms_norm": NORM,
    "cross_entropy": ENTROPY,
}
#: few rows, which torch's own function serves, and many, which a kernel serves
SIZES = {"rms_norm": ({}, dict(N=5000))}
CALLS = [
    pytest.param(op, sizes, error, words, change, id=f"{op}-{words[:60]}")
    for op, table in TABLES.items()
    for sizes in SIZES.get(op, ({},))
    for error, rows in table.items()
    for words, change in rows.items()
]


@pytest.mark.parametrize("named", [{}, {"backend": "reference"}], ids=["", "reference"])
@pytest.mark.parametrize("op, sizes, error, words, change", CALLS)
def test_the_error_names_the_argument(op, sizes, error, words, change, named):
    kw = BUILDERS[op](**sizes) | named
    kw |= {name: value(kw[name]) if callable(value) else value for name, value in change.items()}
    refused(re.escape(words), getattr(rk, op), **kw, error=error)


def heads_first(*names):
    """Return the named tensors as [B,H,N,D], the layout of torch's own attention."""
    return {name: (lambda t: t.transpose(-3, -2).contiguous()) for name in names}


LAYOUTS = [
    ("relative_attention", heads_first("query", "key", "value"), r"^query: .*H=4 heads as in \w+; .*\[B,H,N,D\]\?$"),
    ("relative_attention", heads_first("query"), r"^query: .*did you pass \[B,H,N,D\]\?$"),
    ("relative_attention", heads_first("key", "value"), r"^key: .*; got G=12: did you pass \[B,G,S,D\]\?$"),
    ("chunked_cross_attention", heads_first("query"), r"^query: .*did you pass \[B,H,N,D\]\?$"),
    ("chunked_cross_attention", heads_first("key", "value"), r"^key: .*; got G=8: did you pass \[B,L,K,G,R,D\]\?$"),
    ("chunked_cross_attention", {"chunk_len": 3}, r"^chunk_len: expected 4, for rel_key has T = .*; got 3$"),
    ("chunked_cross_attention", {"chunk_len": 9}, r"^chunk_len: expected 4, for rel_key has T = .*; got 9$"),
    ("relative_logits", heads_first("query"), r"^query: .*did you pass \[B,H,N,D\]\?$"),
    ("leaky_average", heads_first("x") | {"initial": None}, r"^x: .*as in decay; .*did you pass \[B,H,N,D\]\?$"),
]


HEADS_FIRST = {
    "query of cross-attention": lambda: rk.chunked_cross_attention(
        *(torch.randn(1, 4, 96, 16), *torch.randn(2, 1, 6, 2, 8, 4, 16)), chunk_len=16
    ),
    "query alone": lambda: rk.relative_attention(torch.randn(1, 4, 96, 16), *torch.randn(2, 1, 96, 4, 16)),
    "all three": lambda: rk.relative_attention(*torch.randn(3, 1, 4, 160, 16)),
}
TOKENS_FIRST = {
    "cross-attention": lambda: rk.chunked_cross_attention(
        *(torch.randn(1, 12, 16, 16), *torch.randn(2, 1, 3, 2, 8, 4, 16)), chunk_len=4
    ),
    "a decode step": lambda: rk.relative_attention(torch.randn(1, 1, 16, 16), *torch.randn(2, 1, 16, 1, 16)),
    "a short prompt": lambda: rk.relative_attention(*torch.randn(3, 1, 4, 32, 16)),
}


@pytest.mark.parametrize("name", HEADS_FIRST)
def test_more_heads_than_tokens_that_fit_transposed_warn(name):
    with pytest.warns(UserWarning, match=r"^query: expected \[B,N,H,D\]; got N=4 tokens and H=\d+ heads .*transpose"):
        HEADS_FIRST[name]()


@pytest.mark.parametrize("name", TOKENS_FIRST)
def test_more_heads_than_tokens_alone_do_not_warn(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TOKENS_FIRST[name]().shape[-1] == 16


def test_a_table_of_another_length_is_not_blamed_on_chunk_len():
    query, key = torch.randn(1, 100, 2, 16), torch.randn(1, 1, 2, 8, 2, 16)
    rk.chunked_cross_attention(query, key, key, chunk_len=64, rel_key=torch.randn(2, 71, 16))
    for rows in (70, 72):
        with pytest.raises(ValueError, match=rf"^rel_key: .*T = chunk_len\+R-1 = 71 .*; got T={rows}$"):
            rk.chunked_cross_attention(query, key, key, chunk_len=64, rel_key=torch.randn(2, rows, 16))


@pytest.mark.parametrize("biases", [False, True], ids=["", "with biases"])
@pytest.mark.parametrize("op, change, message", LAYOUTS)
def test_another_layout_or_chunk_len_is_named_first(op, change, message, biases):
    """Not the relative keys or biases, which are right."""
    build = {
        "relative_attention": lambda: inputs.self_attention(1, N=12, biases=biases),
        "chunked_cross_attention": lambda: inputs.cross_attention(1, N=18, M=4, R=8, biases=biases),
        "relative_logits": lambda: inputs.relative_logits(1, N=7, biases=biases),
        "leaky_average": lambda: inputs.leaky(1, N=7),
    }
    kw = build[op]()
    kw |= {name: new(kw[name]) if callable(new) else new for name, new in change.items()}
    refused(message, getattr(rk, op), **kw)


@pytest.mark.parametrize(
    "op, build",
    [("relative_attention", inputs.self_attention), ("chunked_cross_attention", inputs.cross_attention)],
)
def test_no_head_is_no_other_layout(op, build):
    kw = build(1, rel=None, biases=False)
    for name in ("query", "key", "value"):
        kw[name] = kw[name][..., :0, :]
    refused(r"^key: expected G key/value heads that divide the H=0 query heads; got G=0$", getattr(rk, op), **kw)


def test_one_token_and_one_table_for_all_heads_are_no_other_layout():
    for op, kw in (
        ("relative_attention", inputs.self_attention(1, N=1, heads="shared")),
        ("chunked_cross_attention", inputs.cross_attention(1, N=1, heads="shared", extra_chunks=1)),
        ("relative_logits", inputs.relative_logits(1, N=1, heads="shared")),
    ):
        getattr(rk, op)(**kw)


@pytest.mark.parametrize("width", [1, 256])
def test_the_narrowest_and_the_widest_positions_are_served(width):
    query, rel_key = torch.randn(1, 2, 1, width), torch.randn(1, 3, width)
    got = rk.relative_logits(query, rel_key, key_len=2)
    torch.testing.assert_close(got, rk.relative_logits(query, rel_key, key_len=2, backend="reference"))
