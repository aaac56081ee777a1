"""Retrofit by the decoder's own attention with the Hugging Face library: Trainer, generate, folders."""

import pytest
import torch

from tests.model.test_own_attention import HEADS, LAYERS, K, M, R, V, batch, make

transformers = pytest.importorskip("transformers")
huggingface = pytest.importorskip("retro_model.integrations.huggingface")
OPTIONS = {"neighbours": "own", "chunk_len": M, "neighbour_len": R}


def whole(decoder=None, **changes):
    model = huggingface.RetrofitForCausalLM.from_decoder(decoder or make("Llama"), **OPTIONS | changes)
    torch.manual_seed(1)
    torch.nn.init.normal_(model.model.bias)
    return model.eval()


def retrieve(chunks):
    return (chunks.repeat(1, 2)[:, None, :R] + torch.arange(K)[:, None]) % V, None


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


def test_a_decoder_from_nowhere_is_saved_whole(tmp_path):
    model = whole()
    model.save_pretrained(tmp_path)
    tokens, neighbours, _ = batch()
    again = huggingface.RetrofitForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(tokens, neighbours=neighbours).logits, model(tokens, neighbours=neighbours).logits)


def test_generate_reads_neighbours_as_chunks_complete():
    model = whole()
    prompt = torch.tensor([[0, 0, 3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8]])
    real = (prompt != 0).long()
    texts = model.generate(prompt, attention_mask=real, retrieve=retrieve, max_new_tokens=2 * M + 1, do_sample=False)
    for row, pad in zip(texts, (2, 0)):
        text = row[pad:]
        for end in range(7 - pad, len(text)):
            if text[end - 1] == 2:  # the end of the text
                break
            neighbours = retrieve(text[: end // M * M].view(-1, M))[0][None]
            assert model(text[None, :end], neighbours=neighbours).logits[0, -1].argmax() == text[end]


@pytest.mark.parametrize("kind", ["plain", "checkpointing", "adapters"])
def test_the_trainer_trains_what_was_added(tmp_path, kind):
    decoder = make("Llama").float()
    if kind == "adapters":
        peft = pytest.importorskip("peft")
        decoder = peft.get_peft_model(decoder, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model = huggingface.RetrofitForCausalLM.from_decoder(decoder, **OPTIONS)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tokens, neighbours, _ = batch()
    rows = [{"input_ids": t, "neighbours": n} for t, n in zip(tokens, neighbours)] * 2
    arguments = transformers.TrainingArguments(
        tmp_path,
        max_steps=3,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        gradient_checkpointing=kind == "checkpointing",
    )
    collator = huggingface.NeighbourCollator(chunk_len=M)
    transformers.Trainer(model, arguments, train_dataset=rows, data_collator=collator).train()
    moved = {name.removeprefix("model.") for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    adapters = {name for name in moved if "lora_" in name}
    assert moved - adapters == {"bias", "scale"} and bool(adapters) == (kind == "adapters")
    assert model.model.bias.shape == (LAYERS, HEADS)


def test_neighbours_are_read_by_the_adapters_of_the_moment():
    """A changed adapter changes the states of neighbours, so cached states must not be used."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    decoder = peft.get_peft_model(
        make("Llama"), peft.LoraConfig(r=2, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    )
    model = whole(decoder).model
    tokens, neighbours, mask = batch()
    with torch.no_grad(), model.keeping():
        first = model(tokens, neighbours, neighbour_mask=mask)
        lora = next(p for name, p in decoder.named_parameters() if "lora_B" in name)
        lora.mul_(2)
        got = model(tokens, neighbours, neighbour_mask=mask)
    with torch.no_grad():
        assert torch.equal(got, model(tokens, neighbours, neighbour_mask=mask)) and not torch.equal(got, first)
