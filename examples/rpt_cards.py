"""Cards: made-up documents whose content returns beyond the window. Does an RPT find it again by itself?

A document shows a few cards again and again, in random order. A card is a cue of one chunk (names, then noise) and a
content of one chunk of random tokens. Only an earlier showing of the same card predicts its content. A chunk is "far"
if its card was shown before, but not within the window, so that only retrieval can help. A retriever over the
document's own past learns which chunk a reference language model prefers.

The score is the nats per far token with the model's own neighbours, with those that the reference prefers ("teacher"),
with random ones (the control), and without retrieval. With --reworded, a returning cue has other forms of its words, so
that lexical search fails.

    python examples/rpt_cards.py                       # about five minutes on two cores
    python examples/rpt_cards.py --reworded --steps 450

Source: Rubin and Berant, arXiv 2306.13421; the documents are this project's own.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from retro_model.evaluation.rpt import random_chunks
from retro_model.layers.copying import start_rpt_copying
from retro_model.rpt import RPT, RPTConfig
from retro_model.rpt.supervision import Supervision, stack, supervise
from retro_model.training import Settings
from retro_model.training.rpt import Lessons, make_optimizer, train_step

EXCLUDED = 8  # number of chunks before a chunk that are not retrieved, because the window covers them
#: The lower layers and the chunk attention learn slowly and the embeddings fast. Otherwise the lower layers learn what
#: all cues have in common before the embeddings learn which forms belong to one word.
REWORDED_RATES = dict.fromkeys(("layers.0.", "layers.1.", "retriever.attention."), 0.1) | {"embedding.": 3.0}


@dataclass(frozen=True)
class Deck:
    """Documents of `showings` * 2 chunks of `chunk_len` tokens.

    cards: number of cards per document. names: name tokens per cue; the rest of the cue is noise. contents: tokens that
    contents and noise are drawn from. words, forms: number of words for names, and forms per word; each form is a
    token. altered: share of the content that is drawn again at each showing.
    """

    cards: int = 5
    showings: int = 20
    chunk_len: int = 16
    names: int = 10
    contents: int = 64
    words: int = 64
    forms: int = 1
    altered: float = 0.05

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.contents + self.words * self.forms

    def documents(self, count: int, seed: int) -> tuple[Tensor, np.ndarray]:
        """Draw tokens int64 [count, L*m]. Return them and the card [count, L] of each chunk."""
        random = np.random.default_rng(seed)
        tokens = np.empty((count, self.showings, 2, self.chunk_len), np.int64)
        shown = random.integers(0, self.cards, (count, self.showings))
        for document, cards in zip(tokens, shown):
            words = np.stack([random.permutation(self.words)[: self.names] for _ in range(self.cards)])
            form = random.integers(0, self.forms, words.shape)
            content = random.integers(0, self.contents, (self.cards, self.chunk_len))
            for cue_and_content, card in zip(document, cards):
                cue_and_content[0, : self.names] = self.contents + words[card] * self.forms + form[card]
                cue_and_content[0, self.names :] = random.integers(0, self.contents, self.chunk_len - self.names)
                fresh = random.random(self.chunk_len) < self.altered
                cue_and_content[1] = np.where(fresh, random.integers(0, self.contents, self.chunk_len), content[card])
                form[card] = (form[card] + 1) % self.forms  # The next showing has the next form of each word.
        return torch.from_numpy(tokens.reshape(count, -1)), np.repeat(shown, 2, 1)

    def right(self, shown: np.ndarray, excluded: int) -> np.ndarray:
        """Return bool [count,L,L]: cue j has the card of cue i and is at least `excluded` chunks before it."""
        number = np.arange(shown.shape[1])
        cue = number % 2 == 0
        same = (shown[:, :, None] == shown[:, None]) & cue[:, None] & cue
        return same & (number <= number[:, None] - excluded)

    def far(self, shown: np.ndarray) -> np.ndarray:
        """Return bool [count,L]: cues whose card was shown before, but not within the last EXCLUDED chunks."""
        before, retrievable = self.right(shown, 1), self.right(shown, EXCLUDED)
        return retrievable.any(-1) & ~(before & ~retrievable).any(-1)


class Reference:
    """Reference language model: it predicts the token two chunks earlier where the cue has the words of that cue.

    After (c_j, c_{j+1}, c_i) it predicts c_{j+1} again, so a candidate c_j that shows the same card as c_i has a high
    target score. Like a large language model, it knows which forms belong to one word.
    """

    def __init__(self, deck: Deck, doubt: float = 0.1):
        self.deck, self.doubt = deck, doubt

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return logits [B,T,V] of tokens [B,T], whole chunks."""
        deck, distance = self.deck, 2 * self.deck.chunk_len
        uniform = self.doubt / deck.vocab_size
        logits = torch.full((*tokens.shape, deck.vocab_size), math.log(uniform))
        before = tokens[:, : tokens.shape[1] - distance + 1]
        logits[:, distance - 1 :].scatter_(-1, before.unsqueeze(-1), math.log(1 - self.doubt + uniform))
        chunks = tokens.unflatten(1, (-1, deck.chunk_len))
        names = chunks[..., : deck.names] - deck.contents
        words = torch.where(names >= 0, names // deck.forms, -1)
        same = torch.zeros(chunks.shape[:2], dtype=torch.bool)  # [B,n]: cue n - 1 has the words of cue n - 3
        same[:, 3:] = ((words[:, :-3] == words[:, 2:-1]) & (words[:, :-3] >= 0)).all(-1)
        target = (torch.arange(tokens.shape[1]) + 1).clamp(max=tokens.shape[1] - 1) // deck.chunk_len
        return torch.where(same[:, target].unsqueeze(-1), logits, -math.log(deck.vocab_size))


def lessons(deck: Deck, tokens: Tensor, candidates: int) -> Supervision:
    """Return the target scores by the reference of the chunks before each chunk."""
    sizes = {"chunk_len": deck.chunk_len, "excluded_chunks": EXCLUDED, "candidates": candidates}
    return stack([supervise(row, Reference(deck), **sizes) for row in tokens])


@torch.no_grad()
def score(model: RPT, tokens: Tensor, far: Tensor, right: Tensor, taught: Supervision) -> dict[str, float]:
    """Return the nats per far token for each source of neighbours, and the recall of a right chunk among the K."""
    model.eval()
    teacher, results = taught.teacher(model.config.num_neighbours), {}
    sources = {"own": {}, "teacher": {"index": teacher}, "random": {"index": random_chunks(teacher, EXCLUDED)}}
    for name, options in (sources | {"off": {"retrieval": False}}).items():
        parts = []
        for first in range(0, len(tokens), 8):
            rows = tokens[first : first + 8]
            given = {key: v[first : first + 8] if isinstance(v, Tensor) else v for key, v in options.items()}
            logits = model(rows, **given)[:, :-1]
            nats = F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")
            parts.append(F.pad(nats, (1, 0)).unflatten(1, (-1, model.config.chunk_len)))
        results[name] = torch.cat(parts)[:, 1:][far[:, :-1]].mean().item()  # the content after a far cue
    found = torch.cat([model.retrieve(rows)[1] for rows in tokens.split(8)])
    hit = right.gather(2, found.clamp(min=0)) & (found >= 0)
    return results | {"recall": hit.any(-1)[far].double().mean().item()}


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train and score. Return the last scores."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name, default in (("steps", 250), ("documents", 256), ("scored", 24), ("every", 50), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--reworded", action="store_true", help="give returning cues other forms of their words")
    parser.add_argument("--showings", type=int, default=20, help="cards that a document shows (default: 20)")
    options = parser.parse_args(arguments)
    deck = Deck(words=32, forms=8) if options.reworded else Deck()
    deck = Deck(**(vars(deck) | {"showings": options.showings}))
    tokens, _ = deck.documents(options.documents, 2 * options.seed + 1)
    scored, shown = deck.documents(options.scored, 2 * options.seed + 2)
    far, right = torch.from_numpy(deck.far(shown)), torch.from_numpy(deck.right(shown, EXCLUDED))
    candidates = 2 * options.showings  # every chunk, because BM25's candidates leave out reworded cues
    taught, expected = (lessons(deck, rows, candidates) for rows in (tokens, scored))
    print(f"{far.double().mean():.0%} of the chunks are far cues; chance: {math.log(deck.contents):.2f} nats per token")
    torch.manual_seed(options.seed)
    sizes = {"d_model": 64, "d_ff": 256, "num_heads": 2, "num_layers": 4, "cca_layers": (3, 4), "segment": 64}
    model = RPT(
        RPTConfig(deck.vocab_size, chunk_len=deck.chunk_len, excluded_chunks=EXCLUDED, score_scale=0.125, **sizes)
    )
    # Learning to read a neighbour would take thousands of steps. Which chunk to read is learned.
    start_rpt_copying(model)
    settings = Settings(options.steps, 3e-3, warmup_steps=options.steps // 12, weight_decay=0.0, betas=(0.9, 0.99))
    alpha = 30.0 if options.reworded else 1.0  # weight of the retrieval loss
    plan = Lessons(options.steps, alpha_ret=alpha, retriever_alpha=alpha, alpha_steps=0, tau=4.0)
    optimizer = make_optimizer(model, settings, plan, "adamw", REWORDED_RATES if options.reworded else {})
    order, results = torch.randperm(len(tokens)), {}
    for step in range(options.steps):
        rows = order[torch.arange(4 * step, 4 * step + 4) % len(order)]
        train_step(model, optimizer, tokens[rows], taught.rows(rows), settings, plan, step)
        if (step + 1) % options.every == 0 or step + 1 == options.steps:
            results = score(model, scored, far, right, expected)
            print(f"step {step + 1}: nats per far token", *(f"{name} {value:.2f}" for name, value in results.items()))
    return results


if __name__ == "__main__":
    main()
