"""One folder an op. Start reading here.

    __init__      the public function: signature and docstring
    call          its arguments as a value: shapes, checks, outputs, what differentiates
    reference     the definition, in plain PyTorch
    cpu, cuda, triton   backends; each is there or not
    tiles.json    tile sizes of the Triton kernels
    cases         calls that stand for what users launch, for compilation ahead of time

A call goes  __init__ -> core.eager -> core.plan -> a backend of the op,  or through torch's operator where a
tracer, a transform or the profiler is active (core.operator).
"""
