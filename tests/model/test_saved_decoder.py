"""A retrofit whose decoder was changed in memory: the saved folder loads the decoder as it was when it was saved."""

import functools
import json
import shutil
import socket

import pytest
import torch
from torch.nn.utils import prune

from tests.model import decoders
from tests.model.test_huggingface import rows
from tests.model.test_own_attention import make
from tests.model.test_retrofit import ADDED, LAYERS, M, R, V, retrieve
from tests.refusals import refused

transformers = pytest.importorskip("transformers")
huggingface = pytest.importorskip("retro_model.integrations.huggingface")
from retro_model.integrations import _saved_decoder  # noqa: E402

RetrofitForCausalLM = huggingface.RetrofitForCausalLM


def origin(folder, decoder=None):
    """Save a decoder, and return it as the library loads it: with an origin."""
    torch.manual_seed(0)
    (decoder or decoders.llama(V, LAYERS)).save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def retrofitted(decoder, **changes):
    torch.manual_seed(1)
    options = dict(neighbours="own", chunk_len=M, neighbour_len=R) if changes.pop("own", True) else ADDED
    return RetrofitForCausalLM.from_decoder(decoder, **options | changes).eval()


def assert_loads_as_it_was(model, folder, **options):
    """Save, load, and compare outputs, tensors and the decoder's configuration."""
    model.save_pretrained(folder, **options)
    again = RetrofitForCausalLM.from_pretrained(folder).eval()
    for p in again.parameters():
        p.data = p.data.clone()  # weights lie at any address of the file, and products round by the address
    batch = huggingface.NeighbourCollator(M, retrieve)(rows(2))
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, model(**batch).logits)
    here, there = (m.state_dict() for m in (model, again))
    assert here.keys() == there.keys()
    for name in here:
        assert here[name].dtype == there[name].dtype and torch.equal(here[name], there[name]), name
    ours, theirs = (m.model.decoder.config.to_dict() for m in (model, again))
    dtype = str(next(model.model.decoder.parameters()).dtype).removeprefix("torch.")
    assert theirs.pop("dtype") == dtype and ours.pop("dtype")
    assert {n: v for n, v in ours.items() if n[0] != "_"} == {n: v for n, v in theirs.items() if n[0] != "_"}
    return again


def fine_tuned(decoder):
    out = decoder(torch.arange(6)[None], labels=torch.arange(6)[None])
    out.loss.backward()
    torch.optim.SGD(decoder.parameters(), lr=0.1).step()
    decoder.zero_grad()
    return decoder


@torch.no_grad()
def pruned_weights(decoder):
    weight = decoder.model.layers[1].mlp.up_proj.weight
    weight[weight.abs() < weight.abs().median()] = 0
    return decoder


def pruned_layers(decoder, kept=(0, 2)):
    decoder.model.layers = torch.nn.ModuleList([decoder.model.layers[at] for at in kept])
    for at, layer in enumerate(decoder.model.layers):
        layer.self_attn.layer_idx = at
    decoder.config.num_hidden_layers = len(kept)
    return decoder


def resized(decoder):
    decoder.resize_token_embeddings(V + 3)
    return decoder


def merged(decoder):
    return decoders.lora(decoder).merge_and_unload()


def rounded(decoder):
    for p in decoder.parameters():
        p.data = p.to(torch.bfloat16).float()
    return decoder


@torch.no_grad()
def untied(decoder):
    decoder.lm_head.weight = torch.nn.Parameter(decoder.lm_head.weight * 2)
    return decoder


WRITTEN = {"fine-tuned": fine_tuned, "pruned weights": pruned_weights, "pruned layers": pruned_layers}
WRITTEN |= {"resized": resized, "merged": merged, "rounded": rounded}
NAMED = {"nothing": lambda d: d, "double": torch.nn.Module.double, "fewer layers": lambda d: pruned_layers(d, (0, 1))}


@pytest.mark.parametrize("how", WRITTEN)
@pytest.mark.parametrize("own", [True, False], ids=["own", "new"])
def test_a_decoder_whose_weights_changed_is_written(tmp_path, how, own):
    decoder = WRITTEN[how](origin(tmp_path / "base"))
    model = retrofitted(decoder, own=own, **({} if own or how != "pruned layers" else {"cca_layers": (2,)}))
    assert model.config.base is not None  # it still has an origin
    assert_loads_as_it_was(model, tmp_path / "saved")
    shutil.rmtree(tmp_path / "base")
    RetrofitForCausalLM.from_pretrained(tmp_path / "saved")


@pytest.mark.parametrize("how", NAMED)
def test_a_decoder_whose_weights_are_its_origins_is_named(tmp_path, how):
    model = retrofitted(NAMED[how](origin(tmp_path / "base")))
    assert_loads_as_it_was(model, tmp_path / "saved")
    assert not (tmp_path / "saved" / "decoder").exists()


def test_a_change_after_the_retrofit_is_saved_too(tmp_path):
    model = retrofitted(origin(tmp_path / "base"))
    model.save_pretrained(tmp_path / "before")
    model.model.decoder.model.norm.weight.data.mul_(1.5)  # a write that changes no version
    assert_loads_as_it_was(model, tmp_path / "after")
    model.model.decoder.resize_token_embeddings(V + 3)
    with pytest.raises(ValueError, match=f"decoder: expected vocab_size = {V}, .*; got {V + 3}; change the decoder b"):
        model.save_pretrained(tmp_path / "resized")
    refused(r"resize_token_embeddings: .* before `from_decoder`", model.resize_token_embeddings, V + 5)


def test_a_readout_that_is_no_longer_tied_is_saved(tmp_path):
    decoder = untied(origin(tmp_path / "base", decoders.llama(V, LAYERS, tie_word_embeddings=True)))
    assert_loads_as_it_was(retrofitted(decoder), tmp_path / "saved")


def test_a_changed_configuration_is_saved(tmp_path):
    decoder = origin(tmp_path / "base", make("Mistral window").float())
    decoder.config.sliding_window = 3
    model = retrofitted(decoder)
    again = assert_loads_as_it_was(model, tmp_path / "saved")
    assert again.model.decoder.config.sliding_window == 3 and not (tmp_path / "saved" / "decoder").exists()
    decoder.generation_config.repetition_penalty = 1.5
    again = assert_loads_as_it_was(model, tmp_path / "saved")
    assert again.generation_config.repetition_penalty == 1.5


def test_the_base_of_adapters_is_written_if_it_changed(tmp_path):
    for name, change in {"named": lambda d: d, "written": fine_tuned, "unknown": lambda d: d}.items():
        decoder = change(origin(tmp_path / "base"))
        if name == "unknown":
            decoder.config._name_or_path = ""
        model = retrofitted(decoders.lora(decoder))
        assert_loads_as_it_was(model, tmp_path / name)
        assert (tmp_path / name / "decoder").exists() == (name != "named")
        assert not list((tmp_path / name / "decoder").glob("adapter*"))
    model.config.base = None
    model.save_pretrained(tmp_path / "written")
    plain = origin(tmp_path / "base")
    retrofitted(plain).save_pretrained(tmp_path / "written")  # over a folder with adapters
    assert not [n for n, _ in RetrofitForCausalLM.from_pretrained(tmp_path / "written").named_modules() if "lora" in n]
    model.model.decoder.merge_adapter()
    refused("decoder: expected adapters that are not merged", model.save_pretrained, tmp_path / "merged")
    other = retrofitted(decoders.lora(origin(tmp_path / "base")))
    other.model.decoder.add_adapter("second", next(iter(other.model.decoder.peft_config.values())))
    with pytest.raises(ValueError, match="decoder: expected one adapter, named 'default'; got default, second"):
        other.save_pretrained(tmp_path / "second")


def test_an_origin_on_the_hub_is_compared_with_the_cached_copy(tmp_path, monkeypatch):
    """Saving opens no connection. A name that is not in the cache is not accepted as the origin."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("a connection was opened"))
    decoder = origin(tmp_path / "cache" / "models--somebody--decoder" / "snapshots" / "abc")
    look_up = functools.partial(_saved_decoder.try_to_load_from_cache, cache_dir=tmp_path / "cache")
    monkeypatch.setattr(_saved_decoder, "try_to_load_from_cache", look_up)
    decoder.config._commit_hash = "abc"
    for name, written in (("somebody/decoder", False), ("nobody/nothing-here", True)):
        decoder.config._name_or_path = name
        model = retrofitted(decoder)
        model.save_pretrained(tmp_path / "saved")
        assert (tmp_path / "saved" / "decoder").exists() == written
        config = json.loads((tmp_path / "saved" / "config.json").read_text())
        assert config.get("base") == (None if written else name)
    RetrofitForCausalLM.from_pretrained(tmp_path / "saved")


def test_what_the_configuration_does_not_rebuild_is_refused(tmp_path):
    decoder = origin(tmp_path / "base")
    prune.l1_unstructured(decoder.model.layers[0].mlp.up_proj, "weight", 0.5)
    model = retrofitted(decoder)
    message = "decoder: expected a decoder that its configuration describes"
    refused(message, model.save_pretrained, tmp_path / "saved")
    prune.remove(decoder.model.layers[0].mlp.up_proj, "weight")
    assert_loads_as_it_was(model, tmp_path / "saved")

    class Own(transformers.LlamaForCausalLM):
        pass

    refused(message, retrofitted(Own(decoder.config)).save_pretrained, tmp_path / "own")
    with pytest.raises(ValueError, match="blocks: expected None"):
        retrofitted(decoder, own=False, blocks=decoder.model.layers, attention="self_attn")


def test_the_options_of_saving(tmp_path):
    model = retrofitted(decoders.llama(V, LAYERS))
    model.save_pretrained(tmp_path / "saved", is_main_process=False)
    assert not (tmp_path / "saved").exists()
    refused("push_to_hub: expected False", model.save_pretrained, tmp_path / "saved", push_to_hub=True)
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "saved", state_dict=state, max_shard_size="10KB")
    again = RetrofitForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again.model.bias, model.model.bias + 1)
    assert torch.equal(again.model.decoder.lm_head.weight, model.model.decoder.lm_head.weight)
    assert len(list((tmp_path / "saved" / "decoder").glob("model-*.safetensors"))) > 1
