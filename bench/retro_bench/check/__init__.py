"""Checks of a contender: the float64 oracle, error norms, and the verdict."""
