"""All private names of Triton that the package uses. They have no public fallback. Tested with triton 3.6 to 3.9.

Triton is imported inside the functions, because it may not be installed.
"""

from __future__ import annotations

import functools

from .target import Target


def driver():
    """Return Triton's module of the active GPU driver."""
    from triton.runtime import driver

    return driver


def specialised(kernel) -> frozenset[str]:
    """Return the parameters to which a Triton kernel is specialised if their value is 1 or a multiple of 16."""
    return frozenset(p.name for p in getattr(kernel, "params", ()) if not p.do_not_specialize)


def gpu(target: Target):
    """Return the target of Triton's compiler."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget(target.backend, target.arch, target.warp_size)


@functools.cache
def _binder(kernel, target: Target):
    """Return Triton's backend for a target, and the function that binds a kernel's arguments. Triton generates it."""
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(gpu(target))
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


def source(launch, target: Target):
    """Return (ASTSource, options) exactly as a launch of these arguments on the target builds them."""
    from triton.compiler import ASTSource

    kernel, kwargs = launch.kernel, {**launch.arguments, **launch.options}
    backend, bind = _binder(kernel, target)
    bound, specialization, options = bind(**kwargs)
    options, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, specialization, options)
    return ASTSource(kernel, signature, constants, attributes), options


def compiled(launch, target: Target):
    """Return the kernel of a launch, compiled for the target. The machine need not have such a GPU."""
    import triton

    src, options = source(launch, target)
    return triton.compile(src, target=gpu(target), options=options.__dict__)


def compiler_key() -> str:
    """Return the hash of the files of Triton's compiler."""
    from triton.runtime.cache import triton_key

    return triton_key()
