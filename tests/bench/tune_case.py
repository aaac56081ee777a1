"""A case small enough for Triton's interpreter, for `retro-bench tune --plugin tests.bench.tune_case`."""

import retro_bench

retro_bench.register(
    retro_bench.Case("leaky_average", "tiny", {"B": 1, "N": 12, "H": 1, "D": 16}, "a test", modes=("fwd",), devices=())
)
