"""Commands of `python -m retro_model` that are no demonstration."""
