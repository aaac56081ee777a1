"""Time and memory of a call, and the ceilings of this machine."""
