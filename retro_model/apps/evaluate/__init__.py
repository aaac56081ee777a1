"""`retro-model neighbours` and `lm-eval`."""
