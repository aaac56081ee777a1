"""A retrofitted decoder under Trainer, generate and save_pretrained."""

import copy
import hashlib
import json
import pickle
import warnings

import pytest
import torch

from retro_kernels.testing import relative_error
from retro_model.generation import generate
from tests.model import decoders
from tests.model.test_retrofit import ADDED, K, M, R, V, gpt2, llama, retrieve
from tests.refusals import refused

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

from retro_model.integrations.huggingface import NeighbourCollator, RetrofitForCausalLM  # noqa: E402


def model(make=llama, **changes):
    torch.manual_seed(0)
    return RetrofitForCausalLM.from_decoder(make().eval(), **ADDED, cca_output="fresh", **changes)


def rows(count, length=2 * M + 3):
    g = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(V, (length,), generator=g)} for _ in range(count)]


@pytest.mark.parametrize("make", [gpt2, llama])
def test_generate_retrieves_in_the_loop(make):
    """Against our own sampling, prompts of different lengths padded on the left; retrieval changes the result."""
    ours = model(make).double().eval()
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9]]
    ids, real = torch.zeros(2, 10, dtype=torch.int64), torch.zeros(2, 10, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, 10 - len(prompt) :], real[row, 10 - len(prompt) :] = torch.tensor(prompt), 1
    options = dict(attention_mask=real, max_new_tokens=2 * M, do_sample=False, eos_token_id=None, pad_token_id=0)
    got = ours.generate(ids, retrieve=retrieve, **options)
    want = generate(ours.model, prompts, 2 * M, retrieve=retrieve)
    assert [row[10 - len(p) :].tolist() for row, p in zip(got, prompts)] == [row.tolist() for row in want]
    assert not torch.equal(got, ours.generate(ids, retrieve=None, **options))


@torch.no_grad()
@pytest.mark.parametrize("name", ["cache", "past_key_values"])  # transformers 5.24 renamed it
def test_a_cache_is_filled_unless_it_is_not_to_be_used(name):
    ours, tokens, past = model().eval(), torch.arange(2 * M)[None], transformers.DynamicCache()
    want = ours(tokens).logits
    assert torch.equal(ours(tokens, **{name: past}, use_cache=False).logits, want) and past.get_seq_length() == 0
    for use_cache in (None, True):
        past = transformers.DynamicCache()
        parts = [ours(part, **{name: past}, use_cache=use_cache).logits for part in tokens.split(M, 1)]
        assert relative_error(torch.cat(parts, 1), want) < 1e-5 and past.get_seq_length() == 2 * M


@pytest.mark.parametrize("tuned", [False, True])
def test_decoding_without_retrieval_is_never_silent(tuned):
    decoder = llama().eval()
    decoder = decoders.lora(decoder) if tuned else decoder
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    want = decoder.generate(input_ids=prompt, **options)
    ours = RetrofitForCausalLM.from_decoder(decoder, **ADDED, cca_output="fresh").eval()
    for again in (ours, pickle.loads(pickle.dumps(copy.deepcopy(ours)))):
        with pytest.warns(UserWarning, match="retrieve: expected a function, or None to decode without retrieval"):
            assert torch.equal(again.generate(prompt, **options), want)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            assert torch.equal(again.generate(prompt, retrieve=None, **options), want)
            again.generate(prompt, retrieve=retrieve, **options)
    weights = [p for p in again.model.decoder.parameters()]
    assert not any(p is q for p in weights for q in ours.model.decoder.parameters())


def test_adapters_are_saved_with_what_was_added(tmp_path):
    torch.manual_seed(0)
    base = llama().eval()
    base.save_pretrained(tmp_path / "base")
    ours = RetrofitForCausalLM.from_decoder(decoders.lora(base), **ADDED, cca_output="fresh").eval()
    ours.save_pretrained(tmp_path / "saved")
    batch = NeighbourCollator(M, retrieve)(rows(2))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = RetrofitForCausalLM.from_pretrained(tmp_path / "saved", decoder=plain).eval()
    assert torch.equal(again(**batch).logits, ours(**batch).logits)
    trained = [{name for name, p in one.named_parameters() if p.requires_grad} for one in (ours, again)]
    assert trained[0] == trained[1]
    inner = RetrofitForCausalLM.from_decoder(decoders.lora(llama()).get_base_model(), **ADDED)
    refused("decoder: expected the PeftModel", inner.save_pretrained, tmp_path / "inner")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_trains_what_was_added_and_nothing_else(tmp_path, checkpointing):
    ours = model()
    before = {name: p.detach().clone() for name, p in ours.named_parameters()}
    steps = dict(max_steps=4, gradient_accumulation_steps=2, logging_steps=1, save_steps=4)
    data = dict(train_dataset=rows(16), eval_dataset=rows(2), data_collator=NeighbourCollator(M, retrieve))
    trainer = decoders.trainer(ours, tmp_path / "run", gradient_checkpointing=checkpointing, **steps, **data)
    start = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < start
    moved = {name for name, p in ours.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if not name.startswith("model.decoder.")}
    saved = RetrofitForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-4").eval()
    batch = NeighbourCollator(M, retrieve)(rows(2))
    assert torch.equal(saved(**batch).logits, ours.eval()(**batch).logits)


def test_the_collator_pads_and_masks():
    batch_rows = rows(1, 2 * M + 1) + rows(1, M - 1) + rows(1, M)
    batch = NeighbourCollator(M, retrieve)(batch_rows)
    assert batch["input_ids"].shape == (3, 2 * M + 1) and batch["neighbours"].shape == (3, 2, K, R)
    assert batch["neighbour_mask"].all((2, 3)).tolist() == [[True, True], [False, False], [True, False]]
    assert (batch["labels"] == -100).sum(1).tolist() == [0, M + 2, M + 1]
    ours = model().double().eval()
    whole = ours(**batch).logits
    alone = ours(**NeighbourCollator(M, retrieve)(batch_rows[2:])).logits
    torch.testing.assert_close(whole[2, :M], alone[0], rtol=1e-10, atol=1e-10)
    assert "neighbours" not in NeighbourCollator(M)(batch_rows)
    with pytest.raises(ValueError, match=r"neighbours: expected \[n//M,K,R\] with n//M = 2 for n=17"):
        NeighbourCollator(M)([{**batch_rows[0], "neighbours": batch["neighbours"][0, :1]}])


IDS = torch.zeros(2, 4, dtype=torch.int64)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (dict(input_ids=IDS[0]), ValueError, r"input_ids: expected \[B,N\] \(2 dimensions\)"),
        (dict(labels=IDS[:, 1:]), ValueError, "labels: expected .* N=4; got N=3"),
        (dict(labels=IDS.float()), TypeError, "labels: expected torch.int64 token ids; got torch.float32"),
        (dict(labels=IDS + V), ValueError, f"labels: expected token ids from 0 to V-1 = {V - 1}; got {V}"),
    ],
)
def test_wrong_inputs_are_named(training, wrong, error, message):
    refused(message, model().train(training), **{"input_ids": IDS, "labels": IDS, **wrong}, error=error)


def test_weights_of_another_shape_are_named(tmp_path):
    ours = model()
    ours.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = safetensors.load_file(file)
    name = min(weights)
    safetensors.save_file(weights | {name: torch.zeros(3, 3)}, file)
    config = json.loads((tmp_path / "config.json").read_text())  # with a right digest
    config["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(rf"size mismatch for {name}", RetrofitForCausalLM.from_pretrained, tmp_path, error=RuntimeError)


@pytest.mark.parametrize("training", [True, False])
def test_the_loss_is_the_mean_over_labels_that_follow_a_token(training):
    """The first label follows no token. The Trainer's own count is used if it gives one."""
    ours, batch = model().train(training), torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = batch.clone()
    labels[0, 5:] = -100
    labels[1, :3] = -100
    with torch.no_grad():
        logits = ours(batch).logits.double()
        kept = [
            -torch.log_softmax(logits[b, t - 1], -1)[labels[b, t]]
            for b in range(2)
            for t in range(1, 9)
            if labels[b, t] != -100
        ]
        assert len(kept) == 4 + 6
        assert float(ours(batch, labels=labels).loss) == pytest.approx(float(sum(kept)) / 10, rel=1e-5)
        counted = ours(batch, labels=labels, num_items_in_batch=7).loss
        assert float(counted) == pytest.approx(float(sum(kept)) / 7, rel=1e-5)
        nothing = ours(batch, labels=torch.full_like(labels, -100)).loss
        assert float(nothing) == 0


def test_a_folder_that_was_changed_is_named(tmp_path):
    ours = model()
    ours.save_pretrained(tmp_path / "m")
    weights, config = tmp_path / "m/model.safetensors", tmp_path / "m/config.json"
    kept, said = weights.read_bytes(), json.loads(config.read_text())
    weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"model\.safetensors: truncated or corrupt: its SHA-256"):
        RetrofitForCausalLM.from_pretrained(tmp_path / "m")
    weights.write_bytes(kept[:20])
    config.write_text(json.dumps(said | {"sha256": hashlib.sha256(kept[:20]).hexdigest()}))
    refused(r"model\.safetensors: truncated or corrupt", RetrofitForCausalLM.from_pretrained, tmp_path / "m")
    weights.write_bytes(kept)
    wrong = {"decoder": ["llama"], "retrieval": "x", "base": 3, "sha256": None}
    for name, value in wrong.items():
        config.write_text(json.dumps(said | {name: value}))
        refused(rf"config\.json: corrupt \({name} is", RetrofitForCausalLM.from_pretrained, tmp_path / "m")
    theirs = {"dtype": "x", "id2label": 3, "vocab_size": "x", "model_type": ["llama"]}
    for text in (
        json.dumps(said)[:99],
        *(json.dumps(said | {"decoder": said["decoder"] | {n: v}}) for n, v in theirs.items()),
    ):
        config.write_text(text)
        refused(r"config\.json: corrupt \(", RetrofitForCausalLM.from_pretrained, tmp_path / "m")
    config.write_text(json.dumps(said | {"retrieval": said["retrieval"] | {"chunk_len": None}}))
    refused(r"chunk_len|corrupt", RetrofitForCausalLM.from_pretrained, tmp_path / "m")
