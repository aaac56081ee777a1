"""Commands of the program `retro-model`. `__main__` lists them.

options.py     the options of all commands
retrofit/      gives a frozen decoder a library
compare/       scores that decoder, with and without the library, next to the alternatives
neighbours.py  makes the tokens, keys and neighbours of a data set
lm_eval.py     runs the evaluation harness on a trained model
"""
