"""RPT's evaluation: whole documents token by token, the retriever against the reference language model.

    document = encode(model, tokens, block=1024)                 # every earlier chunk is retrievable
    wanted = supervise(tokens, lm, ..., candidates=chunks).dense()    # s_t of every earlier chunk
    print(perplexity(document.nats), ranking(document.scores, wanted))
    print(retrieval_share(model, tokens[None], lessons))       # in a forward pass, a training step and decoding

Source: Rubin and Berant, arXiv 2306.13421, sections 5.1 and 5.3, tables 2 and 3.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from retro_model.rpt.loss import lambda_rank
from retro_model.rpt.supervision import CANDIDATES, Supervision

from .scoring import evaluating

PRECISION_AT, RECALL_AT, NDCG_AT = 2, 10, 20  # table 3


class Document(NamedTuple):
    """nats: float64 [N], the loss of each token given the tokens before it. The first token has 0 and does not count.
    index: int64 [L,K], the chunks that each chunk retrieved; None if retrieval was off.
    """

    nats: Tensor
    index: Tensor | None


def random_chunks(index: Tensor, excluded_chunks: int, seed: int = 0) -> Tensor:
    """Make the control of retrieval: as many chunks for each, drawn from those that its retriever may choose.

    index: int64 [...,L,K], what was retrieved; its values do not matter. Returns: int64 of the same shape, -1 where
    there are fewer; chunk i has others of 0, ..., i - excluded_chunks.
    """
    number = torch.arange(index.shape[-2])
    ranks = torch.rand(*index.shape[:-1], len(number), generator=torch.Generator().manual_seed(seed))
    k = min(index.shape[-1], len(number))
    best, drawn = ranks.masked_fill(number > number[:, None] - excluded_chunks, -1).topk(k, -1)
    return F.pad(drawn.masked_fill(best < 0, -1), (0, index.shape[-1] - k), value=-1).to(index.device)


@torch.no_grad()
def encode(
    model,
    tokens: Tensor,
    *,
    block: int = 1024,
    index: Tensor | None = None,
    retrieval: bool = True,
    num_neighbours=None,
) -> Document:
    """Read a document from its start through a cache, `block` tokens per call. The result does not depend on the block.

    model: an RPT; runs in evaluation mode, its mode is restored.
    tokens: int64 [N].
    index: int64 [L,K], neighbours in place of the retriever's (BM25's, an oracle's); L complete chunks.
    retrieval, num_neighbours: as in `RPT.forward`.
    """
    m, rows = model.config.chunk_len, tokens[None]
    k = num_neighbours or (None if index is None else index.shape[-1])
    cache, nats, indices = model.make_cache(1, len(tokens), num_neighbours=k), [], []
    with evaluating(model):
        for first in range(0, len(tokens), block):
            part = rows[:, first : first + block]
            chunks = slice(first // m, (first + part.shape[1]) // m)
            neighbours = {} if index is None or chunks.start == chunks.stop else {"index": index[None, chunks]}
            logits, retrieved = model(part, cache=cache, retrieval=retrieval, return_retrieved=True, **neighbours)
            targets = tokens[first + 1 : first + 1 + part.shape[1]]
            counted = logits[0, : len(targets)] if logits.dtype == torch.float64 else logits[0, : len(targets)].float()
            nats.append(F.cross_entropy(counted, targets, reduction="none").double())
            if retrieved is not None:
                indices.append(retrieved.index[0])
    return Document(torch.cat([nats[0].new_zeros(1), *nats]), torch.cat(indices) if indices else None)


def perplexity(documents: Sequence[Tensor]) -> float:
    """exp of the mean nats a token over documents' nats [N], their first tokens left out."""
    return math.exp(sum(float(n[1:].sum()) for n in documents) / sum(len(n) - 1 for n in documents))


def ranking(
    scores: Tensor, target_scores: Tensor, *, precision_at=PRECISION_AT, recall_at=RECALL_AT, ndcg_at=NDCG_AT
) -> dict[str, float]:
    """How well scores s_q [L,L] rank earlier chunks, by target scores s_t [L,L]; both -inf where not retrievable.

        Precision@k: share of the k best by s_q with s_t > 0, over chunks with something to retrieve and a target
        Recall@k:    share of all those with s_t > 0 that are among the k best, over chunks with at least one
        nDCG@k:      sum of (2^max(s_t,0) - 1) / log2(1 + rank) of the k best by s_q over that of the k best by s_t,
                     over the same

    Returns: {"precision@2", "recall@10", "ndcg@20", "queries", "with_positive"}, by the cut-offs that were asked for.
    """
    there = (target_scores > -torch.inf) & (scores > -torch.inf)
    asked = there.any(-1)
    scores = scores.double().masked_fill(~there, -torch.inf)[asked]
    targets = target_scores.double().masked_fill(~there, -torch.inf)[asked]
    order = scores.argsort(dim=-1, descending=True, stable=True)
    ranked = targets.gather(-1, order)  # missing ones last, as -inf
    positive, number = ranked > 0, (targets > 0).sum(-1)
    some = number > 0
    discount = 1 / torch.log2(torch.arange(2, ranked.shape[-1] + 2, dtype=torch.float64))
    cut = slice(0, ndcg_at)

    def dcg(values: Tensor) -> Tensor:
        return ((torch.exp2(values.clamp(min=0)) - 1)[:, cut] * discount[cut]).sum(-1)

    held = (ranked[:, :precision_at] > -torch.inf).sum(-1).clamp(min=1)
    precision = positive[:, :precision_at].sum(-1) / held
    recall = positive[:, :recall_at].sum(-1)[some] / number[some]
    ndcg = dcg(ranked)[some] / dcg(targets.sort(dim=-1, descending=True).values)[some]
    shares = {f"precision@{precision_at}": precision, f"recall@{recall_at}": recall, f"ndcg@{ndcg_at}": ndcg}
    means = {name: float(t.double().mean()) if len(t) else math.nan for name, t in shares.items()}
    return means | {"queries": int(asked.sum()), "with_positive": int(some.sum())}


@torch.no_grad()
def retrieval_share(model, tokens: Tensor, supervision: Supervision | None = None, *, rounds: int = 5) -> dict:
    """Return the share of the time that retrieval takes: 1 - t_off / t_on.

    t_on and t_off are the least times with and without retrieval, measured in alternation. Retrieval includes all that
    it feeds: chunk attention, search, neighbours, gate, chunked cross-attention and the retriever's loss.

    model: an RPT; its mode and gradients are restored.
    tokens: int64 [B,N], at least a chunk of them.
    supervision: lessons of the tokens, for the retriever's loss; None: without that loss.
    rounds: of which the fastest counts.
    Returns: {"forward", "step", "decode"}: of a forward pass without gradients, of a training step's forward and
    backward pass, of decoding m tokens one by one after the others.
    """
    m, training, device = model.config.chunk_len, model.training, tokens.device

    def forward(retrieval: bool) -> None:
        model.eval()(tokens, retrieval=retrieval)

    @torch.enable_grad()
    def step(retrieval: bool) -> None:
        real = torch.ones_like(tokens, dtype=torch.bool)
        out, found = model.train()(tokens, retrieval=retrieval, loss_mask=real, return_retrieved=True)
        loss = out.total
        if supervision is not None and found is not None and found.scores is not None:
            loss = loss + lambda_rank(found.scores, supervision.dense(), 1.0, positives=CANDIDATES)[0]
        torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)

    def decode(retrieval: bool) -> None:
        for token in tokens[:, -m:].split(1, 1):
            model.last_logits(token, retrieval=retrieval, cache=cache)

    least: dict[tuple[str, bool], float] = {}
    for _, retrieval, call in itertools.product(range(rounds), (True, False), (forward, step, decode)):
        if call is decode:  # after the other tokens, whose reading is not timed
            cache = model.eval().make_cache(len(tokens))
            if tokens.shape[1] > m:
                model(tokens[:, :-m], retrieval=retrieval, cache=cache)
        key, seconds = (call.__name__, retrieval), _seconds(device, call, retrieval)
        least[key] = min(seconds, least.get(key, math.inf))
    model.train(training)
    return {name: 1 - least[name, False] / least[name, True] for name in ("forward", "step", "decode")}


def _seconds(device: torch.device, call, *arguments) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call(*arguments)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
