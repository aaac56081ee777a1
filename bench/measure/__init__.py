"""Costs of a call: time, memory; and the ceilings of this machine."""
