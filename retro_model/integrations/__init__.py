"""Other libraries' formats and interfaces.

attention.py    published models on the ops, by one line
huggingface.py  RetrofitForCausalLM: Trainer, generate, save_pretrained
lm_eval.py      a model of the evaluation harness
retro_pytorch.py  retro-pytorch's cross-attention on our op, with its weights
smollm.py       SmolLM2 from the Python package index
"""
