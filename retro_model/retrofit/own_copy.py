"""Copying from neighbours: kNN-LM whose datastore holds the tokens of the neighbours that a text has read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retro_model.base import transfer

START = (-3.0, 8.0, -6.0)  # log temperature, slope and offset before they are fitted
NEVER = 2**62  # column from which masked tokens can be copied
UNSEEN = -1e4  # similarity to a token that cannot be copied


class Entries(NamedTuple):
    """The datastore of B rows.

    tokens: int64 [B,S], the neighbours' tokens that can be copied. states: [B,S,d], the decoder's last states at the
    tokens before them. since: int64 [B,S], the first column of a call that may copy each token.
    """

    states: Tensor
    tokens: Tensor
    since: Tensor

    @classmethod
    def of(cls, states: Tensor, neighbours: Tensor, mask: Tensor, first: Sequence[int], m: int) -> Entries:
        """Make the entries of neighbours [B,L,K,R] with states [B,L,K,R,d]; `first` as in `own_attend.slots`."""
        ends = m * (1 + torch.arange(neighbours.shape[1], device=states.device)) - 1  # a chunk's last token
        ends = ends + transfer.numbers([max(f, 0) // m * m - f for f in first], states.device)[:, None]
        since = torch.where(mask[..., :-1] & mask[..., 1:], ends[..., None, None], NEVER)
        return cls(states[..., :-1, :].flatten(1, 3), neighbours[..., 1:].flatten(1), since.flatten(1))

    def after(self, count: int) -> Entries:
        """Return the entries as the next call sees them, after a call of `count` columns."""
        return self._replace(since=torch.where(self.since < count, 0, NEVER))


class Copying(nn.Module):
    """Mixture of a decoder's distribution with the neighbours' tokens.

    Let h be the last state of the decoder at a token of the text, and y_j its last state at token j of a neighbour that
    this token or an earlier one attends. mu is `centre`; tau, alpha and gamma are `numbers` (the first as log tau).

        c_j = cos(h - mu, y_j - mu)
        odds = exp(gamma + alpha max_j c_j)
        P(w) = (P_decoder(w) + odds sum_j [token j+1 is w] softmax_j(c / tau)) / (1 + odds)

    Source: Khandelwal et al., arXiv 1911.00172, with lambda = odds / (1 + odds).
    """

    def __init__(self, width: int, **where):
        super().__init__()
        self.numbers = nn.Parameter(torch.tensor(START, **where))
        self.register_buffer("centre", torch.zeros(width, **where))

    def similarity(self, hidden: Tensor, entries: Entries) -> Tensor:
        """Return c [B,N,S] of states [B,N,d]; UNSEEN where a column may not copy.

        A plain product: `topk_chunks` would save 0.3 of 2.3 ms per window of 128 tokens (one thread of a Zen 3), of
        which the decoder takes hundreds.
        """
        hidden, states = (F.normalize(t.to(self.centre.dtype) - self.centre, dim=-1) for t in (hidden, entries.states))
        column = torch.arange(hidden.shape[1], device=hidden.device)[:, None]
        return (hidden @ states.mT).masked_fill(entries.since[:, None] > column, UNSEEN)

    def shares(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log odds of copying [...,1] for similarities [...,S], and the share [...,S] of each entry."""
        log_tau, alpha, gamma = self.numbers.unbind()
        best = c.amax(-1, keepdim=True)
        log_odds = torch.where(best > UNSEEN, gamma + alpha * best, -torch.inf)
        return log_odds, torch.softmax(c / log_tau.exp(), -1)

    def forward(self, logits: Tensor, hidden: Tensor, entries: Entries) -> Tensor:
        """Return logits [B,n,V] of the mixture, for the last n of N columns with states [B,N,d].

        Logits of tokens that cannot be copied, and of columns that copy nothing, are unchanged to the bit.
        """
        log_odds, shares = self.shares(self.similarity(hidden, entries)[:, -logits.shape[1] :])
        tokens, index = entries.tokens.unique(return_inverse=True)
        copied = shares.new_zeros(*shares.shape[:2], len(tokens))
        copied = copied.scatter_add(-1, index[:, None].expand_as(shares), shares).clamp_min(1e-30).log()
        some = logits[..., tokens].to(copied.dtype)
        added = logits.to(copied.dtype).logsumexp(-1, keepdim=True) + log_odds + copied
        return logits.index_copy(-1, tokens, torch.logaddexp(some, added).to(logits.dtype))

    def fit(self, nats: Tensor, c: Tensor, right: Tensor, steps: int = 400) -> float:
        """Fit the numbers on T tokens. Return the mean number of nats per token that copying then saves.

        nats: [T], losses of the decoder. c, right: [T,S], similarities, and which entries have the right token.
        """
        optimizer = torch.optim.Adam([self.numbers], lr=0.05)
        for step in range(steps + 1):
            with torch.enable_grad():
                log_odds, shares = self.shares(c)
                copied = (shares * right).sum(-1, keepdim=True).clamp_min(1e-30).log() + log_odds
                loss = (F.softplus(log_odds) - torch.logaddexp(-nats[:, None], copied)).mean()
            if step < steps:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return float(nats.mean() - loss.detach())
