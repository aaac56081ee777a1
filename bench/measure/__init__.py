"""Costs of a call: time, memory, instructions; and the ceilings of this machine."""
