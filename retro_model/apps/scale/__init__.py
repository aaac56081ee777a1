"""Databases of many shards by one command, what they will cost before they are begun, and training on them by many
processes.

recipe.py   what a build is made of
plan.py     bytes, memory and core-hours of a recipe, from measured rates
build.py    the stages, on an executor; what each took
train.py    training on what was built, under torchrun
command.py  `retro-model scale plan|build|train`
"""
