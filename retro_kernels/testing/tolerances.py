"""The table of tolerances. A result passes iff

    error <= EAGER_FACTOR * (error of eager PyTorch in the same type) + FLOOR[type]

Both errors are Frobenius norms relative to the float64 reference. No test has a tolerance of its own.
"""

import torch

EAGER_FACTOR = 2.0

#: Rounding the exact result to the type costs up to 0.29 eps in this norm (uniform rounding error: eps / 2 / sqrt(3));
#: the floor is twice that for the half types. float32: 16 eps, because an exact sum in another order differs by a few.
FLOOR = {
    torch.float64: 1e-12,
    torch.float32: 16 * torch.finfo(torch.float32).eps,
    torch.float16: 0.6 * torch.finfo(torch.float16).eps,
    torch.bfloat16: 0.6 * torch.finfo(torch.bfloat16).eps,
}


def allowed(eager_error: float, dtype: torch.dtype) -> float:
    """Return the largest error that a result of type `dtype` may have. An eager error of NaN (overflow) counts as 0."""
    return FLOOR[dtype] + (EAGER_FACTOR * eager_error if eager_error == eager_error else 0.0)
