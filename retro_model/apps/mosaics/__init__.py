"""The paper's demonstrations, one command each; data is made on the spot, tables and pictures land in a folder.

python -m retro_model mosaics moons       three moons: one head against three (section 3)
python -m retro_model mosaics regbench    languages of random automata, learned in context (section 5, figure 11)
python -m retro_model mosaics text        real text, and contexts longer than in training (section 5, figures 9 and 13)

moons.py regbench.py text.py    the experiments
automata.py                     RegBench's languages
transformer.py                  the baseline of equal size
contest.py                      both models, one training with its curve
command.py                      the command line
"""
