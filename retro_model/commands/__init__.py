"""Commands of the program `retro-model`, one package per command. `__main__` lists them.

retrofit/    gives a frozen decoder a library
compare/     scores that decoder, with and without the library, next to the alternatives
neighbours/  makes the tokens, keys and neighbours of a data set
lm_eval/     runs the evaluation harness on a trained model
"""
