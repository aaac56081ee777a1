"""The tiny Memory Mosaics of their tests."""

import torch

from retro_model.memory_mosaics import MemoryMosaics, MosaicsConfig

VOCAB = 13


def config(**changes) -> MosaicsConfig:
    """Two blocks, three heads of width 16, seven slots."""
    return MosaicsConfig(
        **{"vocab_size": VOCAB, "d_model": 48, "num_heads": 3, "num_layers": 2, "persistent_slots": 7} | changes
    )


def model(seed: int = 0, *, dtype=torch.float32, backend=None, checkpoint=False, **changes) -> MemoryMosaics:
    """Return a model in evaluation mode with random scalars and gains, some key scales beyond their clamp and one value
    of the next token alone.
    """
    torch.manual_seed(seed)
    built = MemoryMosaics(config(**changes), backend, dtype=torch.float64, checkpoint=checkpoint).eval()
    with torch.no_grad():
        built.embedding.weight.normal_()
        for name, parameter in built.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(("stored_decay", "stored_key_scale", "stored_value_scale")):
                parameter.uniform_(-0.2, 0.2)
        built.blocks[0].context.stored_key_scale[0] = 0.6  # clamped at e^5
        built.blocks[-1].context.value_now[-1] = 0  # lambda_psi is infinite
    return built.to(dtype)


def tokens(B: int = 2, N: int = 19, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (B, N), generator=torch.Generator().manual_seed(seed))
