"""A library for a trained decoder: `retro-model retrofit` makes it, `compare` measures it beside the alternatives."""
