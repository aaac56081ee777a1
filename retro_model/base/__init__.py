"""Argument checks, files and progress bars. Every other package of `retro_model` may import them; they import none."""
