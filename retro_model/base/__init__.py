"""Argument checks, files and progress bars: used by every other room, importing none of them."""
