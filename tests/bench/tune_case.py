"""A case small enough for Triton's interpreter, for `python -m bench tune --plugin tests.bench.tune_case`."""

import bench

bench.register(
    bench.Case("leaky_average", "tiny", {"B": 1, "N": 12, "H": 1, "D": 16}, "a test", modes=("fwd",), devices=())
)
