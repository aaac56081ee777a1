"""Decoders of the Hugging Face library, small and untrained, that retrofit's tests share."""

import pytest
import torch

from retro_model.base.checks import RETRIEVED

transformers = pytest.importorskip("transformers")


def llama(vocab: int, layers: int, *, d_ff: int = 64, heads: int = 2, kv_heads: int = 1, longest: int = 64, **fields):
    sizes = dict(hidden_size=32, intermediate_size=d_ff, num_hidden_layers=layers, max_position_embeddings=longest)
    attention = dict(num_attention_heads=heads, num_key_value_heads=kv_heads)
    config = transformers.LlamaConfig(vocab_size=vocab, **sizes, **attention, **fields)
    return transformers.LlamaForCausalLM(config)


def gpt2(vocab: int, layers: int, *, width: int = 32, longest: int = 64):
    config = transformers.GPT2Config(vocab_size=vocab, n_embd=width, n_layer=layers, n_head=2, n_positions=longest)
    return transformers.GPT2LMHeadModel(config)


def in_steps(model, steps, tokens, *found):
    """Return the logits of two texts that are decoded with a cache, some tokens at a time."""
    cache, parts, at, chunk = model.make_cache(2), [], 0, 0
    for step in steps:
        here = slice(chunk, chunk + cache.completes(step))
        inputs = {name: t[:, here] for name, t in zip(RETRIEVED, found)} if here.stop > here.start else {}
        parts.append(model(tokens[:, at : at + step], **inputs, cache=cache))
        at, chunk = at + step, here.stop
    return torch.cat(parts, 1)


def assert_greedy(model, retrieve, prompts, texts, chunk_len: int) -> None:
    """Check each text token by token against the uncached model, which reads the neighbours of the chunks so far."""
    for prompt, text in zip(prompts, texts, strict=True):
        assert text[: len(prompt)].tolist() == prompt
        for end in range(len(prompt), len(text)):
            whole = text[None, :end]
            found = retrieve(whole[0, : end // chunk_len * chunk_len].view(-1, chunk_len))
            inputs = {name: t[None] for name, t in zip(RETRIEVED, found) if t is not None}
            assert model(whole, **inputs)[0, -1].argmax() == text[end]
