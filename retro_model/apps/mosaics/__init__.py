"""The demonstrations of the Memory Mosaics paper, a command each, with tables and pictures in a folder.

retro-model mosaics moons       three moons: one head against three (section 3)
retro-model mosaics regbench    languages of random automata, learned in context (section 5, figure 11)
retro-model mosaics text        real text, and contexts longer than in training (section 5, figures 9 and 13)

moons.py regbench.py text.py    the experiments
automata.py                     RegBench's languages
transformer.py                  the baseline of equal size
contest.py                      both models, and one training with its curve
command.py                      the command line
"""
