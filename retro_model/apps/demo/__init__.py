"""RETRO's demonstration on the sources of Python's standard library."""
