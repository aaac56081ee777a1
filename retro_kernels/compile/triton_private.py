"""All private names of Triton that the package uses. They have no public fallback. Tested with triton 3.6 to 3.9.

Triton is imported inside the functions, because it may not be installed.
"""

from __future__ import annotations


def driver():
    """Return Triton's module of the active GPU driver."""
    from triton.runtime import driver

    return driver


def specialised(kernel) -> frozenset[str]:
    """Return the parameters to which a Triton kernel is specialised if their value is 1 or a multiple of 16."""
    return frozenset(p.name for p in getattr(kernel, "params", ()) if not p.do_not_specialize)


def gpu(arch: int):
    """Return the target of Triton's compiler for an architecture."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", arch, 32)


def source(launch, arch: int):
    """Return (ASTSource, options) exactly as a launch of these arguments on a GPU of `arch` builds them."""
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel, backend = launch.kernel, make_backend(gpu(arch))
    kwargs = {**launch.arguments, **launch.options}
    bound, specialization, options = create_function_from_signature(kernel.signature, kernel.params, backend)(**kwargs)
    options, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, specialization, options)
    return ASTSource(kernel, signature, constants, attributes), options


def compiled(launch, arch: int):
    """Return the kernel of a launch, compiled for a GPU of `arch`. The machine need not have one."""
    import triton

    src, options = source(launch, arch)
    return triton.compile(src, target=gpu(arch), options=options.__dict__)


def compiler_key() -> str:
    """Return the hash of the files of Triton's compiler."""
    from triton.runtime.cache import triton_key

    return triton_key()
