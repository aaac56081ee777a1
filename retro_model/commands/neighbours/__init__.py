"""`retro-model neighbours`: make the tokens, keys and neighbours of a data set."""
