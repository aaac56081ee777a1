"""The tiny models and inputs of the model's tests."""

import torch

from retro_model.retro import Retro
from retro_model.retro.config import RetroConfig

VOCAB = 37


def config(**changes) -> RetroConfig:
    """Five layers, chunks of 4, neighbours of 6 (not 2M, which nothing may assume), layers 2 and 4 with CCA."""
    sizes = {
        "vocab_size": VOCAB,
        "d_model": 24,
        "d_ff": 40,
        "num_heads": 2,
        "head_dim": 16,
        "num_layers": 5,
        "chunk_len": 4,
        "neighbour_len": 6,
        "cca_layers": (2, 4),
        "encoder_d_model": 20,
        "encoder_d_ff": 28,
        "encoder_heads": 3,
        "encoder_head_dim": 16,
        "max_len": 64,
    }
    return RetroConfig(**sizes | changes)


def model(seed: int = 0, *, backend=None, checkpoint=False, dtype=torch.float32, **changes) -> Retro:
    """Return a model in evaluation mode with random parameters, u, v and the norms' weights included."""
    torch.manual_seed(seed)
    built = Retro(config(**changes), backend=backend, checkpoint=checkpoint, dtype=torch.float64).eval()
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if name.endswith("_bias"):
                parameter.normal_()
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return built.to(dtype)


def inputs(seed: int = 0, *, B=2, N=19, M=4, K=2, R=6, mask: str | None = "token"):
    """Return tokens [B,N], neighbours [B,N//M,K,R] and a mask: None, "neighbour" [B,L,K], "token" [B,L,K,R] with ragged
    ends and absences.
    """
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (B, N), generator=g)
    neighbours = torch.randint(0, VOCAB, (B, N // M, K, R), generator=g)
    if mask is None:
        return tokens, neighbours, None
    lengths = torch.randint(0, R + 1, (B, N // M, K), generator=g)
    return tokens, neighbours, lengths > R // 3 if mask == "neighbour" else torch.arange(R) < lengths.unsqueeze(-1)
