"""kNN-LM, the paper's baseline: the next token of similar contexts, mixed into a language model's probabilities.

p = lambda p_kNN + (1 - lambda) p_LM
p_kNN(w) ~ sum over the k nearest stored contexts followed by w of exp(-alpha d),  d squared L2
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

import retro_kernels as rk
from retro_model.training import gather

from .decoders import without_retrieval
from .scoring import Scores, batches_of_windows, counted_scores, document_rows, evaluating, padded_rows, windows

LAMBDA, ALPHA = 0.118, 0.00785  # tuned on Wikitext103, for embeddings of 1024 (section 4.1, appendix C.2)
NEIGHBOURS = 10
MIXTURES = (0.05, LAMBDA, 0.25, 0.4)
SHARPNESS = (0.1, 0.3, 1.0, 3.0, 10.0)  # of alpha, in units of `alpha_of_distances`
KEYS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class TokenDatastore:
    """Contexts and what followed them. keys: float32 [T,d], activations before the readout. values: int64 [T]."""

    keys: Tensor
    values: Tensor

    @classmethod
    @torch.no_grad()
    def build(
        cls, model: nn.Module, store, *, window: int, stride: int, batch_size: int = 8, documents=None
    ) -> TokenDatastore:
        """Collect the contexts of all tokens but the first of each document, each as long as a window allows.

        documents: ordinals, all by default.
        """
        contexts = _contexts(model, store, window=window, stride=stride, batch_size=batch_size, documents=documents)
        parts = [(hidden.float().cpu(), targets.cpu()) for _, hidden, targets in contexts]
        return cls(*(torch.cat(column) for column in zip(*parts)))

    def nearest(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return squared distances and next tokens [n,k] of the k stored contexts nearest to queries [n,d]."""
        stream = rk.TopkStream(queries[None].float().cpu(), k, metric="l2")
        for first in range(0, len(self.keys), KEYS_AT_ONCE):
            stream.update(self.keys[first : first + KEYS_AT_ONCE][None])
        ids = stream.result()[1][0].long()
        return (queries[:, None].float().cpu() - self.keys[ids]).square().sum(-1), self.values[ids]

    def shuffled(self, seed: int = 0) -> TokenDatastore:
        """Return the control: the same contexts, whose next tokens are shuffled."""
        order = torch.randperm(len(self.values), generator=torch.Generator().manual_seed(seed))
        return replace(self, values=self.values[order])


def score_knn(
    model: nn.Module,
    datastore: TokenDatastore,
    store,
    *,
    window: int,
    stride: int,
    k: int = NEIGHBOURS,
    mixture: float = LAMBDA,
    alpha: float = ALPHA,
    batch_size: int = 8,
    documents=None,
) -> Scores:
    """Score like `score`, by kNN-LM: the tokens and windows are the same, so the two results compare.

        datastore = TokenDatastore.build(baseline, train, window=512, stride=256)
        print(bits_per_byte(score_knn(baseline, datastore, validation, window=512, stride=256)))

    model: ours, a Hugging Face decoder, or a retrofit; with retrieval off.
    datastore: a datastore that the same model has filled.
    mixture, alpha: lambda and alpha above. alpha fits the width of the activations: the inverse of their norm's
        standard deviation is the paper's beginning, `alpha_of_distances` a better one.
    Raises: ValueError naming the argument.
    Source: Khandelwal et al., arXiv 1911.00172; section 4.1 and appendix C.2 of arXiv 2112.04426.
    """
    options = {"window": window, "stride": stride, "k": k, "batch_size": batch_size, "documents": documents}
    [scores] = score_knn_settings(model, datastore, store, [(mixture, alpha)], **options)
    return scores


@torch.no_grad()
def score_knn_settings(
    model: nn.Module,
    datastore: TokenDatastore,
    store,
    settings: Sequence[tuple[float, float]],
    *,
    k: int = NEIGHBOURS,
    documents=None,
    **windows,
) -> list[Scores]:
    """`score_knn` for each (mixture, alpha) of `settings`, by one search. windows: window, stride, batch_size."""
    for mixture, _ in settings:
        if not 0 <= mixture < 1:
            raise ValueError(f"mixture: expected a share from 0 to below 1; got {mixture}")
    if not 1 <= k <= len(datastore.keys):
        raise ValueError(f"k: expected from 1 to the datastore's {len(datastore.keys)} contexts; got {k}")
    model = without_retrieval(model)
    nats = np.zeros((len(settings), len(store.lengths)))
    for rows, hidden, targets in _contexts(model, store, documents=documents, **windows):
        own = torch.log_softmax(model.readout(hidden).float(), -1).gather(-1, targets[:, None])[:, 0].double().cpu()
        distances, followers = datastore.nearest(hidden, k)
        right = followers == targets.cpu()[:, None]
        for of_setting, (mixture, alpha) in zip(nats, settings):
            other = (torch.softmax(-alpha * distances.double(), -1) * right).sum(-1)
            np.add.at(of_setting, rows, -torch.log((1 - mixture) * own.exp() + mixture * other).numpy())
    return [counted_scores(store, of_setting, model.config.vocab_size, documents) for of_setting in nats]


def score_tuned(model: nn.Module, datastore: TokenDatastore, store, *, k: int = NEIGHBOURS, **options) -> Scores:
    """kNN-LM at its best: lambda and alpha from `MIXTURES` x `SHARPNESS`, tuned for each document on the others.

    options: window, stride, batch_size, documents, as in `score_knn`. For one document: the paper's lambda and alpha.
    """
    if len(document_rows(store)) < 2:
        return score_knn(model, datastore, store, k=k, **options)
    alpha = alpha_of_distances(datastore, k)
    settings = list(itertools.product(MIXTURES, (alpha * s for s in SHARPNESS)))
    return best_of_others(score_knn_settings(model, datastore, store, settings, k=k, **options), store)


def best_of_others(scores: Sequence[Scores], store) -> Scores:
    """Return each document's scores by the setting that is best on all other documents.

    scores: scores of the settings on the same tokens. store: at least two documents.
    """
    found = document_rows(store)
    sums = np.array([[s.nats[a:b].sum() for a, b in found] for s in scores])
    chosen = np.argmin(sums.sum(1, keepdims=True) - sums, 0)
    nats = np.zeros_like(scores[0].nats)
    for (a, b), setting in zip(found, chosen):
        nats[a:b] = scores[setting].nats[a:b]
    return Scores(nats, scores[0].tokens, scores[0].bytes)


def alpha_of_distances(datastore: TokenDatastore, k: int = NEIGHBOURS, samples: int = 512) -> float:
    """Return the alpha at which the k-th nearest of a stored context weighs 1/e of the nearest, the context itself left
    out: the median over evenly spaced contexts."""
    k = min(k + 1, len(datastore.keys))
    queries = datastore.keys[:: max(1, len(datastore.keys) // samples)]
    distances = datastore.nearest(queries, k)[0].sort(-1).values[:, 1:]
    return float(1 / (distances[:, -1] - distances[:, 0]).median().clamp(min=1e-6))


def _contexts(model, store, *, window: int, stride: int, batch_size: int = 8, documents=None):
    """Yield, for batches of windows, the scored tokens' rows in the store [n], activations before them [n,d], ids."""
    m, model = store.chunk_len, without_retrieval(model)
    spans = functools.partial(windows, window=window // m, stride=stride // m)
    with evaluating(model) as device:
        for jobs in batches_of_windows(store, documents, batch_size, spans):
            rows = padded_rows(jobs)
            batch = gather(store, rows).to(device)
            # tokens that no earlier window scored
            new = np.repeat(rows >= np.array([job.scored for job in jobs])[:, None], m, 1)
            counted = torch.from_numpy(new).to(device) & batch.real
            hidden = model.activations(batch.tokens)
            here = counted[:, 1:]
            yield np.repeat(rows, m, 1)[:, 1:][here.cpu().numpy()], hidden[:, :-1][here], batch.tokens[:, 1:][here]
