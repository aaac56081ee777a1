"""Other libraries' formats and interfaces.

attention.py    published models through the ops, by one line
huggingface.py  RetrofitForCausalLM: Trainer, generate, save_pretrained
hub.py          tokenizers of the Hugging Face libraries
lm_eval.py      a model of the evaluation harness
"""
