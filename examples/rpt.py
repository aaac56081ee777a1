"""RPT from tokens to text: supervision by BM25, training steps on both losses, decoding with a growing index.

The documents are random: a few chunks recur, farther back than the window reaches. Runs in seconds:

    python examples/rpt.py
"""

from __future__ import annotations

import torch

from retro_model import RPT, RPTConfig, generate
from retro_model.evaluation import rpt as evaluation
from retro_model.rpt.supervision import stack, supervise
from retro_model.training import Settings
from retro_model.training.rpt import Lessons, make_optimizer, train_step

M, V = 8, 60  # tokens per chunk, vocabulary

config = RPTConfig(
    V,
    d_model=32,
    d_ff=64,
    num_heads=2,
    num_layers=4,
    cca_layers=(3, 4),
    chunk_len=M,
    segment=2 * M,
    excluded_chunks=4,
    score_scale=0.2,
)


def document(chunks: int = 24) -> torch.Tensor:
    """Return [chunks * M] tokens: chunks drawn from six, so that they recur."""
    return torch.randint(V, (6, M))[torch.randint(6, (chunks,))].flatten()


def main(steps: int = 20) -> tuple[float, float]:
    """Train, retrieve and decode. Return the first and the last loss."""
    torch.manual_seed(0)
    tokens = torch.stack([document() for _ in range(16)])
    # lm=None scores candidates by BM25 (RPT-Lex); a causal language model would score them by its gain
    lessons = stack([supervise(t, None, chunk_len=M, excluded_chunks=config.excluded_chunks) for t in tokens])
    model = RPT(config)
    settings = Settings(steps, max_lr=5e-3, warmup_steps=2)
    taught = Lessons(steps, alpha_ret=1.0, alpha_steps=0, tau=2.0)
    optimizer = make_optimizer(model, settings, taught, "adamw")
    losses = []
    for step in range(steps):
        report = train_step(model, optimizer, tokens, lessons, settings, taught, step)
        losses.append(report["loss"])
        if step in (0, steps - 1):
            taught_share = f"the teacher gives {report['teacher_share']:.0%} of the neighbours"
            print(f"step {step}: {report['loss']:.3f} nats a token; {taught_share}")

    model.eval()
    scores, index = model.retrieve(tokens[:1])
    ranking = {k: round(v, 2) for k, v in evaluation.ranking(scores[0], lessons.dense()[0]).items()}
    print("chunk 20 retrieves", index[0, 20].tolist(), ranking)
    cache = model.make_cache(batch=1, num_neighbours=3)  # more neighbours than in training
    model(tokens[:1], cache=cache)
    size = f"{len(cache.indexes[0])} chunks to search, {cache.nbytes / 1024:.0f} KB"
    print(f"a cache after {cache.positions[0]} tokens: {size}")
    prompts = [tokens[0, :100], tokens[1, :37]]
    texts = generate(model, prompts, max_new_tokens=20)
    off = generate(model, prompts, max_new_tokens=20, retrieval=False)
    print("with retrieval   ", texts[0][100:].tolist())
    print("with retrieval off", off[0][100:].tolist())
    share = evaluation.retrieval_share(model, tokens, lessons)
    print("retrieval takes", ", ".join(f"{value:.0%} of {name}" for name, value in share.items()))
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
