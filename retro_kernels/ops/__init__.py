"""One folder an op. Start reading here.

    __init__      the public function: signature and docstring
    call          class of the calls: arguments with shapes, checks, differentiable inputs, outputs
    reference     the definition, in plain PyTorch
    cpu, cuda, triton   backends that the op has
    tiles.json    tile sizes of the Triton kernels
    cases         typical calls, for compilation ahead of time

An eager call goes  __init__ -> core.call -> core.operator -> a backend of the op.  Torch's dispatcher stands between
core.call and core.operator where others must see the call. A compiled graph contains the operator, and begins there.
"""
