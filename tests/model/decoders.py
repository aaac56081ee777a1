"""Decoders of the Hugging Face library, small and untrained, that retrofit's tests share."""

import pytest
import torch

from retro_model.base.checks import RETRIEVED
from tests.model import toys
from tests.refusals import refused

transformers = pytest.importorskip("transformers")


def llama(vocab: int, layers: int, *, d_ff: int = 64, heads: int = 2, kv_heads: int = 1, longest: int = 64, **fields):
    sizes = dict(hidden_size=32, intermediate_size=d_ff, num_hidden_layers=layers, max_position_embeddings=longest)
    attention = dict(num_attention_heads=heads, num_key_value_heads=kv_heads)
    config = transformers.LlamaConfig(vocab_size=vocab, **sizes, **attention, **fields)
    return transformers.LlamaForCausalLM(config)


def gpt2(vocab: int, layers: int, *, width: int = 32, longest: int = 64):
    config = transformers.GPT2Config(vocab_size=vocab, n_embd=width, n_layer=layers, n_head=2, n_positions=longest)
    return transformers.GPT2LMHeadModel(config)


def lora(decoder, targets=("q_proj", "v_proj"), **options):
    """Return the decoder with adapters of rank 2 that change its outputs."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    options = {"init_lora_weights": False, "task_type": "CAUSAL_LM"} | options
    return peft.get_peft_model(decoder, peft.LoraConfig(r=2, target_modules=list(targets), **options))


def trainer(model, folder, **options):
    """Return the library's Trainer for steps on the CPU, of two rows each; options of the arguments and the Trainer."""
    pytest.importorskip("accelerate")
    theirs = {name: options.pop(name) for name in ("train_dataset", "eval_dataset", "data_collator") if name in options}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=2, learning_rate=1e-2, **quiet, **options
    )
    return transformers.Trainer(model, arguments, **theirs)


def in_steps(model, steps, tokens, *found):
    """Return the logits of two texts that are decoded with a cache, some tokens at a time."""
    return toys.in_blocks(model, model.make_cache(2), tokens, steps, given=dict(zip(RETRIEVED, found)))


def assert_greedy(model, retrieve, prompts, texts, chunk_len: int) -> None:
    """Check each text token by token against the uncached model, which reads the neighbours of the chunks so far."""
    for prompt, text in zip(prompts, texts, strict=True):
        assert text[: len(prompt)].tolist() == prompt
        for end in range(len(prompt), len(text)):
            whole = text[None, :end]
            found = retrieve(whole[0, : end // chunk_len * chunk_len].view(-1, chunk_len))
            inputs = {name: t[None] for name, t in zip(RETRIEVED, found) if t is not None}
            assert model(whole, **inputs)[0, -1].argmax() == text[end]


def assert_wrong_input_is_named(model, tokens, neighbours, mask) -> None:
    """Check that a wrong mask, a cache of the library and `past_key_values` are refused by name."""
    refused("neighbour_mask: ", model, tokens, neighbours, neighbour_mask=mask[..., :3])
    refused("past_key_values: not supported", model, tokens, neighbours, past_key_values=object())
    for options in ({}, {"attention_mask": torch.ones_like(tokens).index_fill(1, torch.tensor([0]), 0)}):
        with pytest.raises(ValueError, match=r"^cache: expected .*; got a DynamicCache"):
            model(tokens, neighbours, cache=transformers.DynamicCache(), **options)


def assert_checkpointing_changes_no_gradient(model, batches, part, calls: tuple[int, int]) -> None:
    """Check two passes before one backward pass: each recomputed block uses the neighbours of its own pass.

    calls: how often the module `part` is called without and with recomputation.
    """
    computed = []
    part.register_forward_hook(lambda *_: computed.append(1))

    def gradients(count):
        model.zero_grad()
        computed.clear()
        sum(model(t, n, neighbour_mask=k).square().mean() for t, n, k in batches).backward()
        assert len(computed) == count
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    want = gradients(calls[0])
    model.gradient_checkpointing_enable()
    assert model.train() is model
    got = gradients(calls[1])
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-10, atol=1e-12)
    model.gradient_checkpointing_disable()
    gradients(calls[0])


def assert_padding_on_the_left_changes_nothing(model, chunk_len: int, tokens, neighbours, mask, close) -> None:
    """Check that a padded row equals the row alone: with retrieval, without, and decoded with a cache.

    close(got, want) compares.
    """
    N, pad = tokens.shape[1], chunk_len + 3
    short = N - pad
    padded, real = tokens.clone(), torch.ones_like(tokens)
    padded[1], real[1] = torch.cat([tokens.new_zeros(pad), tokens[1, :short]]), torch.arange(N) >= pad
    got = model(padded, neighbours, neighbour_mask=mask, attention_mask=real)
    off = model(padded, attention_mask=real)
    rows = [(0, N, slice(None)), (1, short, slice(pad, None))]
    for row, n, here in rows:
        part, chunks = slice(row, row + 1), n // chunk_len
        alone = model(tokens[part, :n], neighbours[part, :chunks], neighbour_mask=mask[part, :chunks])
        close(got[row, here], alone[0])
        close(off[row, here], model(tokens[part, :n])[0])
    cache, done, parts = model.make_cache(2), [0, 0], []
    for begin, count in [(0, N - 6), (N - 6, 1), (N - 5, 5)]:
        ends = [(begin + count) // chunk_len, max(begin + count - pad, 0) // chunk_len]
        most = max(e - d for e, d in zip(ends, done))
        new, new_mask = (x.new_zeros(2, most, *x.shape[2:]) for x in (neighbours, mask))
        for row, (d, e) in enumerate(zip(done, ends)):
            new[row, : e - d], new_mask[row, : e - d] = neighbours[row, d:e], mask[row, d:e]
        options = {"neighbours": new, "neighbour_mask": new_mask} if most else {}
        if begin != N - 6:  # needed in the first call, optional later without padding
            options["attention_mask"] = real[:, begin : begin + count]
        parts.append(model(padded[:, begin : begin + count], cache=cache, **options))
        done = ends
    for row, _, here in rows:
        close(torch.cat(parts, 1)[row, here], got[row, here])
