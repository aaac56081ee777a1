"""What a call costs: time, memory, instructions, and the ceilings of this machine."""
