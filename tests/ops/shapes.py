"""Random shapes of both attentions."""

from hypothesis import strategies as st

#: shape, positions, biases, heads and seed
ATTENTION = dict(
    B=st.integers(1, 2),
    N=st.integers(1, 40),
    D=st.sampled_from([16, 24, 40, 64]),
    E=st.sampled_from([None, 1, 3, 16]),
    biases=st.booleans(),
    heads=st.sampled_from(["each", "shared"]),
    rel=st.sampled_from([None, "all", "bounded"]),
    rel_start=st.integers(-30, 30),
    T=st.integers(1, 40),
    grouping=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    seed=st.integers(0, 99),
)
#: one token of one head
SMALLEST = dict(B=1, N=1, D=16, E=None, biases=True, heads="each", rel="all", rel_start=0, T=1, grouping=(1, 1), seed=0)
