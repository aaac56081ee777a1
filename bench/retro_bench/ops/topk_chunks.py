"""Top-k of chunks in the harness: its cases, its work and its baselines.

The baselines are a product and torch.topk, whole (`eager`) or by blocks of keys (`blocked`), and FAISS's exact index.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from ..registry import Case, Contender, Later, Operator, Work
from . import _shared as shared
from ._shared import CUDA, FORWARD, RETRO, RPT, inputs, torch

OP = "topk_chunks"
JUDGE = __name__.replace(".ops.topk_chunks", ".check.topk")
INDEX_BYTES = 8  # int64
DOCUMENTS = 64
KEY_BLOCK = 65_536  # keys of one product of `blocked`: 256 MiB of scores for 1024 queries
#: RPT: self-attention sees 2048 tokens, 32 chunks, which a query does not retrieve
RETRIEVER = {"options": {"causal_gap": 32}, "modes": ("fwd", "fwdbwd")}


def _case(name: str, source: str, shape: str, *, modes=FORWARD, **more) -> Case:
    return shared.case(OP, name, source, shape, modes=modes, dtypes=shared.EMBEDDINGS, **more)


CASES = [
    _case(
        "rpt-retriever", f"{RPT}, section 3: chunks of one document, causal", "B=8 Q=256 S=256 D=1024 k=4", **RETRIEVER
    ),
    _case(
        "rpt-retriever-b32", f"{RPT}, section 3, 32 documents", "B=32 Q=256 S=256 D=1024 k=4", **RETRIEVER, devices=CUDA
    ),
    _case("sampling-200k", f"{RETRO}, section 2.3: 16 chunks, small database", "B=1 Q=16 S=200_000 D=256 k=10"),
    _case(
        "precompute-100k", f"{RETRO}, section 2.3: a batch of chunks", "B=1 Q=1024 S=100_000 D=128 k=10", memory_gib=2
    ),
    _case(
        "precompute-l2",
        f"{RETRO}, section 2.3: L2, own document filtered out",
        "B=1 Q=128 S=20_000 D=128 k=10",
        options={"metric": "l2"},
        extras=("query_doc",),
    ),
    _case("sampling-1m", f"{RETRO}, section 2.3: 64 chunks, 10^6 keys", "B=1 Q=64 S=1_000_000 D=1024 k=10", gpu=24),
    _case("precompute-1m", f"{RETRO}, section 2.3: BERT embeddings", "B=1 Q=10_000 S=1_000_000 D=768 k=10", gpu=24),
]


def arguments(case, draw) -> dict[str, Any]:
    s = case.shape
    docs = DOCUMENTS if "query_doc" in case.extras else 0
    return inputs.topk(**{x: s[x] for x in "BQSDk"}, docs=docs, draw=draw, **case.options)


def work(case, itemsize: int, mode: str) -> Work:
    s, options = case.shape, case.options
    b, q, keys, d, k = (s[x] for x in "BQSDk")
    pairs = q * keys
    if (gap := options.get("causal_gap")) is not None:
        offset = options.get("query_offset", 0)
        pairs = sum(min(max(i + offset - gap + 1, 0), keys) for i in range(q))
    output_bytes = b * q * k * (4 + INDEX_BYTES)
    forward = Work(2.0 * b * pairs * d, (b * q * d + b * keys * d) * itemsize + output_bytes)
    if mode != "fwdbwd":
        return forward
    slots = b * q * k
    return forward + Work(4.0 * slots * d, (2 * b * q * d + slots * d + b * keys * d) * itemsize + output_bytes)


def row_elements(case) -> float:
    return shared.product(case, "BSD" if case.options.get("metric") == "l2" else "BS")


def rows(call: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    cut = shared.cut(call, ("query", "query_doc"), first, last)
    if call.get("causal_gap") is not None:
        cut["query_offset"] = call.get("query_offset", 0) + first
    return cut


def _scores(
    query, key, first=0, *, metric="dot", causal_gap=None, query_offset=0, query_doc=None, key_doc=None, key_mask=None
) -> torch.Tensor:
    """Return the scores [B,Q,n] of keys first .. first+n-1; -inf for a key that is not a candidate."""
    scores = query @ key.mT
    if metric == "l2":
        scores = 2 * scores - key.square().sum(-1)[:, None] - query.square().sum(-1)[..., None]
    here = slice(first, first + key.shape[1])
    if causal_gap is not None:
        limit = torch.arange(query.shape[1], device=query.device)[:, None] + (query_offset - causal_gap)
        number = torch.arange(here.start, here.stop, device=query.device)
        scores = scores.masked_fill(number > limit, -torch.inf)
    if query_doc is not None:
        scores = scores.masked_fill(query_doc[:, :, None] == key_doc[:, None, here], -torch.inf)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, here], -torch.inf)
    return scores


def eager(query, key, k, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the whole score matrix in the inputs' type, then torch.topk."""
    best, indices = _scores(query, key, **options).topk(k, dim=-1)
    return best.float(), indices.masked_fill(best == -torch.inf, -1)


def blocked(query, key, k, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Score blocks of keys, and merge each block's best into the running best."""
    best = indices = None
    for first in range(0, key.shape[1], KEY_BLOCK):
        block = key[:, first : first + KEY_BLOCK]
        top, where = _scores(query, block, first, **options).topk(min(k, block.shape[1]), dim=-1)
        where = where + first
        best = top if best is None else torch.cat([best, top], -1)
        indices = where if indices is None else torch.cat([indices, where], -1)
        top, order = best.topk(k, dim=-1)
        best, indices = top, indices.gather(-1, order)
    return best.float(), indices.masked_fill(best == -torch.inf, -1)


class Faiss:
    """FAISS's exact index, kept while the key tensor stays the same: a database is indexed once and searched often."""

    _key = _index = None

    def renew(self) -> None:
        """Index the keys again, because their values changed. It is not timed."""
        if self._key is not None:
            self._index.reset()
            self._index.add(self._key[0].detach().numpy())

    def __call__(self, query, key, k, *, metric="dot"):
        import faiss as library

        if self._key is not key:
            kind = library.IndexFlatIP if metric == "dot" else library.IndexFlatL2
            self._index, self._key = kind(key.shape[2]), key
            self._index.add(key[0].detach().numpy())
        library.omp_set_num_threads(torch.get_num_threads())
        scores, indices = self._index.search(query[0].detach().numpy(), k)
        scores = torch.from_numpy(scores)[None]
        return (scores if metric == "dot" else -scores), torch.from_numpy(indices)[None]


faiss = Faiss()


def _no_faiss(case, dtype, device) -> str | None:
    if importlib.util.find_spec("faiss") is None:
        return "faiss is not installed"
    if dtype != "float32":
        return "FAISS's exact index takes float32"
    if case.shape["B"] != 1 or case.extras or set(case.options) - {"metric"}:
        return "FAISS has no batch, causal limit or document filter"
    return None


def _one_block(case, dtype, device) -> str | None:
    return "one block holds all keys, as in eager" if case.shape["S"] <= KEY_BLOCK else None


def _score_bytes(case, itemsize: int, backward: bool) -> float:
    return shared.product(case, "BQS") * itemsize * (3 if case.options or case.extras else 1)


OPERATOR = Operator(
    OP,
    ("scores", "indices"),
    ("query", "key"),
    arguments,
    shared.outputs(OP),
    work,
    rows=rows,
    row_axes=(1, 1),
    row_elements=row_elements,
    oracle_cost=10.0,  # the reference sorts all scores
    compare=Later(f"{JUDGE}:compare"),
    gradients=Later(f"{JUDGE}:gradients"),
)
BASELINES = (
    Contender(OP, "eager", eager, peak_bytes=_score_bytes),
    Contender(OP, "blocked", blocked, reason=_one_block, differentiable=False),
    Contender(OP, "faiss", faiss, devices=("cpu",), reason=_no_faiss, differentiable=False, renew=faiss.renew),
)
