"""Exit codes of the commands."""

OK = 0
REGRESSION = 1
NUMERICS = 2
INCONCLUSIVE = 3
USAGE = 4
NOTHING_MEASURED = 5
NOT_COMPARED = 6
#: meaning of each code, in their order
MEANINGS = ("ok", "regression", "wrong numbers", "inconclusive", "usage", "nothing measured", "not compared")


class UsageError(ValueError):
    """Error: a command line that can't be carried out. The message names the remedy; the exit code is 4."""
