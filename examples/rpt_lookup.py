"""A small RPT that retrieves from its own past, beyond its window.

Every document is random: eight chunks in four pairs, then the same pairs in another order, beyond the window. So the
second chunk of a pair that recurs can be predicted only by retrieving the pair. In training the model reads the right
chunk, and the retriever learns by LambdaRank to prefer it. Afterwards the model reads what it retrieves itself, and
`generate` adds every chunk to its index.

    python examples/rpt_lookup.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from retro_model import RPT, RPTConfig, generate
from retro_model.apps.rpt.start import start_copying
from retro_model.rpt import lambda_rank

M, V, PAIRS = 8, 32, 4  # tokens a chunk, vocabulary, pairs of chunks a document

CONFIG = RPTConfig(
    V,
    d_model=64,
    d_ff=128,
    num_heads=2,
    num_layers=2,
    cca_layers=(2,),
    chunk_len=M,
    num_neighbours=1,
    segment=2 * M,
    excluded_chunks=4,
)


def documents(count: int) -> Tensor:
    """Return [count, 4 M PAIRS] tokens: pairs of random chunks, then the same pairs in another order."""
    pairs = torch.randint(V, (count, PAIRS, 2 * M))
    # rolled by two pairs: no chunk recurs within four chunks
    return torch.cat([pairs, pairs.roll(2, dims=1)], 1).flatten(1)


def returning() -> Tensor:
    """Return bool [4 M PAIRS - 1], True for predictions of a second chunk whose pair recurs."""
    second = torch.zeros(2 * PAIRS, 2, M, dtype=torch.bool)
    second[PAIRS:, 1] = True
    return second.flatten()[1:]


def supervision(count: int) -> tuple[Tensor, Tensor]:
    """Return the chunk that each should retrieve, [count,L,1] (-1: none), and target scores, [count,L,L].

    In practice a language model computes the scores.
    """
    chunks = torch.arange(2 * PAIRS, 4 * PAIRS)
    right = torch.cat([torch.arange(PAIRS, 2 * PAIRS), torch.arange(PAIRS)])
    index, worth = torch.full((4 * PAIRS, 1), -1), torch.zeros(4 * PAIRS, 4 * PAIRS)
    index[chunks, 0], worth[chunks, right] = right, 1.0
    return index.expand(count, -1, -1), worth.expand(count, -1, -1)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the loss, in nats a token, of the chunks of `returning`."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")[:, returning()].mean()


def main(steps: int = 60) -> tuple[float, float]:
    """Train. Return the loss, in nats a token, of second chunks that recur, with the model's retrieval and without."""
    torch.manual_seed(0)
    model = RPT(CONFIG)
    start_copying(model)  # reading a neighbour would take thousands of steps to learn; what to retrieve is learnt here
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    index, worth = supervision(16)
    for step in range(steps):
        tokens = documents(16)
        logits, retrieved = model(tokens, index=index, return_retrieved=True)
        reading = loss_of(logits, tokens)
        total, pairs = lambda_rank(retrieved.scores, worth, tau=1.0)
        optimizer.zero_grad()
        (reading + total / pairs).backward()
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            retriever = (total / pairs).item()
            print(f"step {step:2d}  loss of what returns {reading.item():.3f}, of the retriever {retriever:.3f}")

    fresh = documents(16)
    with torch.no_grad():
        logits, retrieved = model(fresh, return_retrieved=True)
        on, off = loss_of(logits, fresh).item(), loss_of(model(fresh, retrieval=False), fresh).item()
    hits = (retrieved.index == index)[:, 2 * PAIRS :].float().mean().item()
    print(f"nats a token of what returns: {on:.3f} with its own retrieval (right in {hits:.0%}), {off:.3f} without")

    (text,) = generate(model, fresh[:1, :-M], M)
    print("truth    ", *fresh[0, -M:].tolist())
    print("generated", *text[-M:].tolist())
    return on, off


if __name__ == "__main__":
    main()
