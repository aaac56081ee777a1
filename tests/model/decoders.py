"""Decoders of the Hugging Face library, small and untrained, that retrofit's tests share."""

import pytest

transformers = pytest.importorskip("transformers")


def llama(vocab: int, layers: int, *, d_ff: int = 64, heads: int = 2, kv_heads: int = 1, longest: int = 64, **fields):
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=d_ff,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=longest,
        **fields,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2(vocab: int, layers: int, *, width: int = 32, longest: int = 64):
    config = transformers.GPT2Config(vocab_size=vocab, n_embd=width, n_layer=layers, n_head=2, n_positions=longest)
    return transformers.GPT2LMHeadModel(config)
