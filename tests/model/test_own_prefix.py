"""A shared prefix in front of every text and neighbour, against one softmax over all keys (`joint.py`)."""

import copy

import pytest
import torch

from retro_model.retrofit import retrofit
from tests.model.test_own_attention import (
    DECODERS,
    K,
    M,
    R,
    V,
    assert_steps_equal_the_whole,
    batch,
    joint_logits,
    make,
    own,
)

pytest.importorskip("transformers")

PREFIX = (1, 17, 4, 33, 9)
every_decoder = pytest.mark.parametrize("name", DECODERS)


@every_decoder
@torch.no_grad()
def test_equals_one_softmax_over_prefix_own_and_neighbours_keys(name):
    before, model = own(name, prefix=PREFIX)
    tokens, neighbours, mask = batch()
    got = model(tokens, neighbours, neighbour_mask=mask)
    want = joint_logits(before, model, tokens, neighbours, mask, prefix=torch.tensor(PREFIX))
    close = 1e-5 if "eager" in name else 1e-12
    torch.testing.assert_close(got, want, rtol=0, atol=close)
    _, plain = own(name)
    assert (got - plain(tokens, neighbours, neighbour_mask=mask)).abs().max() > 0.1


@every_decoder
@torch.no_grad()
def test_without_neighbours_the_text_continues_the_prefix(name):
    before, model = own(name, prefix=torch.tensor(PREFIX))
    tokens = batch()[0]
    whole = torch.cat([torch.tensor(PREFIX).expand(len(tokens), -1), tokens], 1)
    close = 1e-5 if "eager" in name else 1e-12
    torch.testing.assert_close(model(tokens), before(whole).logits[:, len(PREFIX) :], rtol=0, atol=close)


@torch.no_grad()
def test_layers_that_attend_no_neighbours_attend_the_prefix():
    before, model = own("Llama", cca_layers=(2,), prefix=PREFIX)
    tokens, neighbours, mask = batch()
    want = joint_logits(before, model, tokens, neighbours, mask, prefix=torch.tensor(PREFIX))
    torch.testing.assert_close(model(tokens, neighbours, neighbour_mask=mask), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Mistral window"])
@torch.no_grad()
def test_a_cache_counts_the_text_alone(name):
    assert_steps_equal_the_whole(own(name, prefix=PREFIX)[1])


@torch.no_grad()
def test_a_changed_weight_reads_the_prefix_again():
    _, model = own("Llama", prefix=PREFIX)
    tokens = batch()[0]
    first = model.prefix_states()
    assert model.prefix_states() is first
    model.decoder.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    fresh = retrofit(copy.deepcopy(model.decoder), neighbours="own", chunk_len=M, neighbour_len=R, prefix=PREFIX)
    assert torch.equal(model(tokens), fresh(tokens))


def test_wrong_prefixes_are_named():
    for prefix, message in (
        ((1, V), f"prefix: expected an int <= {V - 1}; got {V}"),
        ((1, 2.5), "prefix: expected an int"),
        ([1] * 64, "prefix: expected at most 63 tokens"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            retrofit(make("GPT2"), neighbours="own", chunk_len=M, neighbour_len=R, prefix=prefix)
    _, model = own("GPT2", prefix=PREFIX)
    assert model.config.max_len == 64 - len(PREFIX) and model.config.to_dict()["prefix"] == list(PREFIX)
    with pytest.raises(ValueError, match="tokens"):
        model(torch.ones(1, 60, dtype=torch.int64), torch.ones(1, 15, K, R, dtype=torch.int64))
