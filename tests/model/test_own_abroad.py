"""Retrofit by the decoder's own attention with the Hugging Face library: Trainer, generate, folders."""

import functools

import pytest
import torch

from tests.model import decoders
from tests.model.test_own_attention import DECODERS, HEADS, LAYERS, M, R, batch, make, plain

transformers = pytest.importorskip("transformers")
huggingface = pytest.importorskip("retro_model.integrations.huggingface")
OPTIONS = {"neighbours": "own", "chunk_len": M, "neighbour_len": R}


def whole(decoder=None, **changes):
    model = huggingface.RetrofitForCausalLM.from_decoder(decoder or make("Llama"), **OPTIONS | changes)
    torch.manual_seed(1)
    torch.nn.init.normal_(model.model.bias)
    return model.eval()


def test_a_folder_names_its_decoder_and_knows_it_by_its_weights(tmp_path):
    make("Llama").save_pretrained(tmp_path / "decoder")
    decoder = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "decoder")
    model = whole(decoder, cca_layers=(2, 3), sink_token=5)
    model.save_pretrained(tmp_path / "kept")
    assert sum(f.stat().st_size for f in (tmp_path / "kept").iterdir()) < 10_000  # no copy of the decoder
    again = huggingface.RetrofitForCausalLM.from_pretrained(tmp_path / "kept").eval()
    tokens, neighbours, mask = batch()
    inputs = {"neighbours": neighbours, "neighbour_mask": mask}
    assert torch.equal(again(tokens, **inputs).logits, model(tokens, **inputs).logits)
    assert again.model.config == model.model.config
    with torch.no_grad():
        decoder.model.embed_tokens.weight[0] += 1
    decoder.save_pretrained(tmp_path / "decoder")
    with pytest.raises(ValueError, match="expected the decoder that was retrofitted; its weights have changed"):
        huggingface.RetrofitForCausalLM.from_pretrained(tmp_path / "kept")
    for name in ("model.safetensors", None):  # an emptied folder, then a folder that was moved away
        path = tmp_path / "decoder" / name if name else tmp_path / "decoder"
        path.rename(tmp_path / "elsewhere")
        with pytest.raises(
            FileNotFoundError, match=r"decoder: expected the folder of the decoder .*; it (holds no|is missing)"
        ):
            huggingface.RetrofitForCausalLM.from_pretrained(tmp_path / "kept")
        (tmp_path / "elsewhere").rename(path)
    model = huggingface.RetrofitForCausalLM.from_pretrained(tmp_path / "kept", decoder=make("Llama"))
    assert model.config.base is not None


def test_rows_of_the_collator_give_the_logits_of_rows_alone():
    model = whole()
    texts = [torch.arange(2 * M + 1), torch.arange(M - 1), torch.arange(M)]  # the second completes no chunk
    inputs = huggingface.NeighbourCollator(chunk_len=M, retrieve=plain)([{"input_ids": text} for text in texts])
    rows = [{"input_ids": t, "neighbours": plain(t[: len(t) // M * M].view(-1, M))[0]} for t in texts]
    given = huggingface.NeighbourCollator(chunk_len=M)(rows)
    assert given.keys() == inputs.keys() and all(torch.equal(given[name], inputs[name]) for name in given)
    alone = model(texts[2][None], neighbours=plain(texts[2][None])[0][None]).logits
    torch.testing.assert_close(model(**inputs).logits[2:, :M], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["checkpointing", "adapters"])
def test_the_trainer_trains_what_was_added(tmp_path, kind):
    decoder = make("Llama").float()
    decoder = decoders.lora(decoder) if kind == "adapters" else decoder
    model = huggingface.RetrofitForCausalLM.from_decoder(decoder, **OPTIONS)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tokens, neighbours, _ = batch()
    rows = [{"input_ids": t, "neighbours": n} for t, n in zip(tokens, neighbours)] * 2
    data = dict(train_dataset=rows, data_collator=huggingface.NeighbourCollator(chunk_len=M), save_strategy="no")
    decoders.trainer(model, tmp_path, max_steps=3, gradient_checkpointing=kind == "checkpointing", **data).train()
    moved = {name.removeprefix("model.") for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    adapters = {name for name in moved if "lora_" in name}
    assert moved - adapters == {"bias", "scale"} and bool(adapters) == (kind == "adapters")
    assert model.model.bias.shape == (LAYERS, HEADS)


@torch.no_grad()
def test_neighbours_and_prefix_are_read_by_the_adapters_of_the_moment():
    """A changed adapter changes their states, so kept states must not be used."""
    decoder, prefix = decoders.lora(make("Llama"), ("k_proj", "v_proj")), (1, 8, 3, 20)
    model, (tokens, neighbours, mask) = whole(decoder, prefix=prefix).model, batch()
    with model.keeping():
        first = model(tokens, neighbours, neighbour_mask=mask)
        next(p for name, p in decoder.named_parameters() if "lora_B" in name).mul_(2)
        got = model(tokens, neighbours, neighbour_mask=mask)
    assert torch.equal(got, model(tokens, neighbours, neighbour_mask=mask)) and not torch.equal(got, first)
    text = torch.cat([torch.tensor(prefix).expand(2, -1), tokens], 1)
    torch.testing.assert_close(model(tokens), decoder(text).logits[:, len(prefix) :], rtol=0, atol=1e-12)


@torch.no_grad()
def test_generation_without_retrieval_continues_the_prefix():
    model, prompt = whole(prefix=(1, 8, 3, 20)), batch()[0][:1, :5]
    got, text = model.generate(prompt, max_new_tokens=6, do_sample=False, retrieve=None), prompt
    for _ in range(got.shape[1] - prompt.shape[1]):
        text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(got, text) and got.shape[1] > prompt.shape[1]


LATER = ("Gemma", "Gemma2", "Gemma3", "Granite", "Ministral", "Nemotron", "Olmo", "Olmo2", "Olmo3") + (
    *("Phi3", "SmolLM3", "StableLm", "Starcoder2"),
)
#: One decoder per family, with a window if the family has one.
FAMILIES = {name.split()[0]: name for name in DECODERS if name.split()[0] in (*LATER, "GPT2")} | {"Llama": "Llama"}
WITHOUT = [("Starcoder2", ()), ("Llama", ())]


@pytest.mark.parametrize("family, prefix", [*((family, (5, 6, 7)) for family in FAMILIES), *WITHOUT])
@torch.no_grad()
def test_a_family_decodes_padded_rows_and_is_loaded_and_generates(family, prefix, tmp_path):
    """The sliding windows of padded rows count the prefix and the row's own tokens, whatever columns they have."""
    decoder = make(FAMILIES[family])
    # the library's eager attention is float32 and has no mask of whole rows in float64
    dtype, atol = (torch.float32, 1e-4) if "eager" in FAMILIES[family] else (torch.float64, 1e-10)
    model = whole(decoder.to(dtype), prefix=prefix)
    tokens, neighbours, mask = batch()
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=atol)
    decoders.assert_padding_on_the_left_changes_nothing(model.model, M, tokens, neighbours, mask, close)
    model.save_pretrained(tmp_path)
    again = huggingface.RetrofitForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    want = model.model(tokens, neighbours, neighbour_mask=mask)
    close(again.model(tokens, neighbours, neighbour_mask=mask), want)
    prompts, pad = tokens[:, : M + 2], 9
    padded, real = (torch.cat([t.new_zeros(2, pad), t], 1) for t in (prompts, torch.ones_like(prompts)))
    options = dict(retrieve=plain, do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=4)
    texts = again.generate(padded, attention_mask=real, **options)[:, pad:]
    decoders.assert_greedy(model.model, plain, prompts.tolist(), texts, M)
