"""Exit codes, for whoever scripts this."""

OK = 0
REGRESSION = 1
NUMERICS = 2
INCONCLUSIVE = 3
USAGE = 4
NOTHING_MEASURED = 5


class UsageError(ValueError):
    """A command line that can't be carried out; the message names the remedy. Becomes exit code 4."""
