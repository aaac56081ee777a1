"""Is a contender right: the float64 oracle, error norms, and the verdict."""
