"""The case table: the shapes of the published models, small enough for two cores where they run on CPUs by default.

`devices` is where a case belongs to the default selection; `--case NAME` runs any case anywhere its memory suffices.
"""

from __future__ import annotations

from .registry import DTYPES, Case

CPU, CUDA, BOTH = ("cpu",), ("cuda",), ("cpu", "cuda")
FORWARD, DECODE = ("fwd",), ("decode",)
TRANSFORMER_XL = ("rel_key", "content_bias", "position_bias")
#: retrieval scores are wanted in the type of the stored embeddings: float32 on CPUs, all three on GPUs
EMBEDDINGS = {"cpu": ("float32",), "cuda": DTYPES["cuda"]}
RETRO, RPT = "arXiv 2112.04426", "arXiv 2306.13421"
MOSAICS = "arXiv 2405.06394"


def _cca(name: str, source: str, *, options=None, extras=TRANSFORMER_XL, **more) -> Case:
    letters = {x: more.pop(x) for x in list(more) if len(x) == 1}
    shape = {"B": 1, "N": 2048, "M": 64, "K": 2, "R": 128, "H": 16, "D": 64} | letters
    start = (options or {}).get("query_start", 0)
    shape.setdefault("L", (start + shape["N"]) // shape["M"])
    return Case("chunked_cross_attention", name, shape, source, options or {}, extras, **more)


def _relative(name: str, source: str, *, options=None, extras=TRANSFORMER_XL, **more) -> Case:
    letters = {x: more.pop(x) for x in list(more) if len(x) == 1}
    shape = {"B": 1, "N": 1024, "H": 8, "D": 64} | letters
    shape.setdefault("S", shape["N"])
    return Case("relative_attention", name, shape, source, options or {}, extras, **more)


def _causal(**options) -> dict:
    return {"causal": True} | options


CROSS = [
    _cca("retro-172m", f"{RETRO}, table 2, 172m: training sequence, K=2"),
    _cca("retro-1.5b", f"{RETRO}, table 2, 1.5b, 8 sequences", B=8, D=128, devices=CUDA, memory_gib=12),
    _cca("retro-7.5b", f"{RETRO}, table 2, 7.5b, 4 sequences", B=4, H=32, D=128, devices=CUDA, memory_gib=12),
    _cca(
        "rpt-2k",
        f"{RPT}, section 4: gated neighbours, no position logits",
        H=8,
        D=128,
        extras=("neighbour_gate",),
        devices=CPU,
    ),
    _cca(
        "rpt-16k",
        f"{RPT}, section 4: its training length",
        N=16384,
        H=8,
        D=128,
        extras=("neighbour_gate",),
        devices=CUDA,
        memory_gib=8,
    ),
    _cca("eval-k10", f"{RETRO}, figure 1: evaluation with 10 neighbours, 512 tokens", N=512, K=10, modes=FORWARD),
    _cca(
        "eval-k10-2k",
        f"{RETRO}, figure 1: evaluation with 10 neighbours",
        K=10,
        modes=FORWARD,
        devices=CUDA,
        memory_gib=4,
    ),
    _cca(
        "eval-k40",
        f"{RETRO}, figure 1: evaluation with 40 neighbours",
        K=40,
        modes=FORWARD,
        devices=CUDA,
        memory_gib=12,
    ),
    _cca(
        "masked-k4",
        f"{RETRO}, section 2.1: same-document neighbours filtered out",
        N=512,
        K=4,
        extras=(*TRANSFORMER_XL, "neighbour_mask"),
    ),
    _cca("grouped", "grouped-query attention on the 1.5b shape", H=16, G=4, D=128, devices=CUDA, memory_gib=8),
    _cca("decode-1", f"{RETRO}, section 2.4: sampling, one token", N=1, options={"query_start": 2000}, modes=DECODE),
    _cca("decode-16", f"{RETRO}, section 2.4: a block of 16 tokens", N=16, options={"query_start": 2000}, modes=DECODE),
]

LENGTHS = (256, 512, 1024, 2048, 4096)

SELF = [
    _relative("decoder-1k", f"{RETRO}, decoder self-attention", T=1024, options=_causal(rel_start=0)),
    _relative(
        "decoder-2k",
        f"{RETRO}, decoder, 1.5b",
        B=4,
        N=2048,
        H=16,
        D=128,
        T=2048,
        options=_causal(rel_start=0),
        devices=CUDA,
        memory_gib=24,
    ),
    _relative("encoder-self", f"{RETRO}, encoder over the 16 neighbours of 8 chunks", B=16, N=128, H=16),
    _relative("encoder-self-b512", f"{RETRO}, encoder, 8 sequences", B=512, N=128, H=16, devices=CUDA, memory_gib=16),
    _relative(
        "encoder-cross", f"{RETRO}, encoder cross-attention to the chunk, 16 neighbours", B=16, N=128, S=64, H=16
    ),
    _relative(
        "encoder-cross-b512",
        f"{RETRO}, encoder cross-attention, 8 sequences",
        B=512,
        N=128,
        S=64,
        H=16,
        devices=CUDA,
        memory_gib=12,
    ),
    _relative(
        "rpt-window-2k",
        f"{RPT}, section 4, a shorter window",
        N=2048,
        D=128,
        extras=(),
        options=_causal(window=512),
        devices=(),
    ),
    _relative(
        "rpt-window-16k",
        f"{RPT}, section 4: sliding window",
        N=16384,
        D=128,
        extras=(),
        options=_causal(window=2048),
        devices=CUDA,
        memory_gib=40,
    ),
    _relative(
        "mosaics",
        f"{MOSAICS}, contextual memory",
        B=2,
        N=512,
        H=12,
        extras=(),
        options=_causal(causal_gap=1, scale=0.125),
    ),
    _relative(
        "mosaics-b32",
        f"{MOSAICS}, contextual memory, 32 sequences",
        B=32,
        N=512,
        H=12,
        extras=(),
        options=_causal(causal_gap=1, scale=0.125),
        devices=CUDA,
        memory_gib=12,
    ),
    _relative(
        "low-rank-1k",
        "relative logits of width 16, extent 256",
        E=16,
        T=256,
        extras=("rel_key", "rel_query"),
        options=_causal(rel_start=0),
    ),
    _relative(
        "low-rank-8k",
        "relative logits of width 16, extent 1024",
        N=8192,
        E=16,
        T=1024,
        extras=("rel_key", "rel_query"),
        options=_causal(rel_start=0),
        devices=CUDA,
        memory_gib=32,
    ),
    _relative("conformer", "arXiv 2005.08100: bidirectional over 60 s of speech", N=1500, devices=CUDA, memory_gib=4),
    _relative("conformer-750", "arXiv 2005.08100: bidirectional over 30 s of speech", N=750, devices=()),
    _relative(
        "t5",
        "arXiv 1910.10683: a scalar bias per displacement",
        N=512,
        E=1,
        extras=("rel_key", "rel_query"),
        devices=BOTH,
    ),
    _relative(
        "grouped-4k",
        "grouped-query decoder",
        N=4096,
        H=16,
        G=4,
        D=128,
        T=4096,
        options=_causal(rel_start=0),
        devices=CUDA,
        memory_gib=24,
    ),
    _relative(
        "decode",
        f"{RETRO}, decoder, one token against 2047 cached",
        N=1,
        S=2048,
        H=16,
        T=2048,
        options=_causal(rel_start=0),
        modes=DECODE,
    ),
]

LOGITS = [
    Case(
        "relative_logits",
        "decoder-1k",
        {"B": 1, "N": 1024, "S": 1024, "H": 8, "E": 64},
        RETRO,
        extras=("position_bias",),
    ),
    Case(
        "relative_logits",
        "encoder",
        {"B": 16, "N": 128, "S": 128, "H": 16, "E": 64},
        RETRO,
        extras=("position_bias",),
        devices=CPU,
    ),
    Case(
        "relative_logits",
        "low-rank-8k",
        {"B": 1, "N": 8192, "S": 8192, "H": 8, "E": 16, "T": 1024},
        "relative logits of width 16, extent 1024",
        {"rel_start": 0},
        devices=CUDA,
        memory_gib=16,
    ),
]


def _topk(name: str, source: str, shape: dict[str, int], **more) -> Case:
    return Case("topk_chunks", name, shape, source, modes=more.pop("modes", FORWARD), dtypes=EMBEDDINGS, **more)


RETRIEVER = {"B": 8, "Q": 256, "S": 256, "D": 1024, "k": 4}
TOPK = [
    # RPT: the 2048 tokens that self-attention sees are 32 chunks, which no query may retrieve
    _topk(
        "rpt-retriever",
        f"{RPT}, section 3: chunks of one document, causal",
        RETRIEVER,
        options={"causal_gap": 32},
        modes=("fwd", "fwdbwd"),
    ),
    _topk(
        "rpt-retriever-b32",
        f"{RPT}, section 3, 32 documents",
        RETRIEVER | {"B": 32},
        options={"causal_gap": 32},
        modes=("fwd", "fwdbwd"),
        devices=CUDA,
    ),
    _topk(
        "sampling-200k",
        f"{RETRO}, section 2.3: 16 chunks, small database",
        {"B": 1, "Q": 16, "S": 200_000, "D": 256, "k": 10},
    ),
    _topk(
        "precompute-100k",
        f"{RETRO}, section 2.3: a batch of chunks",
        {"B": 1, "Q": 1024, "S": 100_000, "D": 128, "k": 10},
        memory_gib=2,
    ),
    _topk(
        "precompute-l2",
        f"{RETRO}, section 2.3: L2, own document filtered out",
        {"B": 1, "Q": 128, "S": 20_000, "D": 128, "k": 10},
        options={"metric": "l2"},
        extras=("query_doc",),
    ),
    _topk(
        "sampling-1m",
        f"{RETRO}, section 2.3: 64 chunks, 10^6 keys",
        {"B": 1, "Q": 64, "S": 1_000_000, "D": 1024, "k": 10},
        devices=CUDA,
        memory_gib=24,
    ),
    _topk(
        "precompute-1m",
        f"{RETRO}, section 2.3: BERT embeddings",
        {"B": 1, "Q": 10_000, "S": 1_000_000, "D": 768, "k": 10},
        devices=CUDA,
        memory_gib=24,
    ),
]

#: on request: peak memory and time against sequence length, all else equal
SWEEP = [
    _relative(
        f"length-{n}",
        "decoder-1k at other lengths",
        N=n,
        T=n,
        options=_causal(rel_start=0),
        devices=(),
        memory_gib=max(1, 8 * n**2 / 2048**2),
    )
    for n in LENGTHS
]

AVERAGES = [
    Case("leaky_average", "mosaics", {"B": 8, "N": 512, "H": 12, "D": 64}, f"{MOSAICS}, key extractor"),
    Case(
        "leaky_average",
        "mosaics-b64",
        {"B": 64, "N": 512, "H": 12, "D": 64},
        f"{MOSAICS}, 64 sequences",
        devices=CUDA,
        memory_gib=4,
    ),
    Case(
        "leaky_average",
        "long",
        {"B": 1, "N": 8192, "H": 12, "D": 64},
        "a long document, with a state carried in",
        extras=("initial",),
    ),
]

ALL = (*CROSS, *SELF, *SWEEP, *LOGITS, *TOPK, *AVERAGES)
