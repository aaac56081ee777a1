"""The demonstrations of the Memory Mosaics paper: `retro-model mosaics moons`, `regbench` and `text`."""
