"""The tiny model and tokens of RPT's tests."""

import torch

from retro_model.rpt import RPT, RPTConfig
from tests.model.rpt.naive import Naive

VOCAB = 31


def config(**changes) -> RPTConfig:
    """Four layers, chunks of 4, segments of 8, two chunks excluded."""
    sizes = {
        "vocab_size": VOCAB,
        "d_model": 32,
        "d_ff": 40,
        "num_heads": 2,
        "num_layers": 4,
        "cca_layers": (3, 4),
        "chunk_len": 4,
        "segment": 8,
        "excluded_chunks": 2,
    }
    return RPTConfig(**sizes | changes)


def model(seed: int = 0, *, dtype=torch.float64, backend=None, checkpoint=False, **changes) -> RPT:
    """Return a model in evaluation mode whose every parameter is random: norms, null slots and a gate that reaches its
    floor too.
    """
    torch.manual_seed(seed)
    built = RPT(config(**changes), dtype=torch.float64, backend=backend, checkpoint=checkpoint).eval()
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "null" in name:
                parameter.normal_()
            elif name == "gate.weight":
                parameter.normal_().mul_(3 * len(parameter) ** 0.5)  # gates from the floor to nearly 1
        if built.retriever is not None:
            torch.nn.init.normal_(built.retriever.key.weight, std=0.2)
    return built.to(dtype)


def tokens(n: int = 43, batch: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, n), generator=torch.Generator().manual_seed(seed))


def naive(built: RPT) -> Naive:
    return Naive({name: value.double().numpy() for name, value in built.state_dict().items()}, built.config)
