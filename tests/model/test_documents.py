"""Stores of common sources: rows of `datasets`, plain strings, Hugging Face tokenizers."""

import numpy as np
import pytest

from retro_model import evaluation
from retro_model.data.documents import as_documents
from retro_model.data.hub import HubTokenizer
from retro_model.data.store import build_store
from retro_model.data.tokens import Tokenizer
from tests.model.toys import Bigram

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["the cat sat on the mat", "Ünïcode — ✓ and </s> in a text", "the cat sat on the mat", "a dog"]


def byte_level(**special):
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": ["<pad>", "</s>"], "initial_alphabet": alphabet, "show_progress": False}
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, **options)
    model.train_from_iterator(TEXTS * 3, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", pad_token="<pad>", **special)


def word_piece():
    vocabulary = {"[UNK]": 0, "the": 1, "cat": 2, "##s": 3, "a": 4, "dog": 5}
    model = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer, model.decoder = tokenizers.pre_tokenizers.Whitespace(), tokenizers.decoders.WordPiece()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="[UNK]")


def test_a_byte_level_tokenizer_counts_every_byte(tmp_path):
    theirs = byte_level(bos_token="</s>")
    theirs.padding_side = "left"
    ours = HubTokenizer(theirs)
    for text, ids in zip(TEXTS, ours.encode_batch(TEXTS)):
        assert ours.byte_lengths[ids].sum() == len(text.encode()) and theirs.decode(ids) == text == ours.decode(ids)
    store = build_store(tmp_path / "store", TEXTS, theirs, chunk_len=4, bos=True)
    assert store.num_bytes == sum(len(t.encode()) for t in TEXTS)
    assert store.bos_id == theirs.eos_token_id and all(store.document_tokens(d)[0] == store.bos_id for d in range(4))
    assert build_store(tmp_path / "store", TEXTS, theirs, chunk_len=4, bos=True).identity == store.identity
    # the caller's tokenizer is unchanged
    assert theirs(TEXTS[:2], padding=True)["input_ids"][0][0] == theirs.pad_token_id


def test_the_tokenizers_own_begin_is_free_in_scores(tmp_path):
    """The id 1, BOS in our own vocabulary, is an ordinary token in another."""
    theirs = byte_level(bos_token="<pad>")
    store = build_store(tmp_path / "s", TEXTS, theirs, chunk_len=4, bos=True)
    counted = evaluation.score(Bigram(store.vocab_size), store, window=8, stride=4).tokens
    assert counted.sum() == store.num_tokens - len(TEXTS)
    without = build_store(tmp_path / "w", [("a", "", np.array([1, 5, 6]))], byte_level(), chunk_len=4)
    assert without.bos_id is None
    assert evaluation.score(Bigram(store.vocab_size), without, window=8, stride=4).tokens.sum() == 3
    with pytest.raises(ValueError, match=r"bos: expected False for .* has no BOS token"):
        build_store(tmp_path / "n", TEXTS, byte_level(), chunk_len=4, bos=True)


def test_other_tokenizers(tmp_path):
    with pytest.warns(UserWarning, match=r"PreTrainedTokenizerFast|TokenizersBackend"):
        ours = HubTokenizer(word_piece())
    assert ours.byte_lengths[[2, 3]].tolist() == [3, 1] and not ours.exact
    assert [i.tolist() for i in ours.encode_batch(["the cats", "a dog"])] == [[1, 2, 3], [4, 5]]
    plain = byte_level().backend_tokenizer
    store = build_store(tmp_path / "s", TEXTS, plain, chunk_len=4)
    assert [store.document_tokens(0).tolist()] == [plain.encode(TEXTS[0]).ids]
    for other in ("gpt2", transformers.ByT5Tokenizer()):  # the latter is written in Python
        with pytest.raises(TypeError, match=rf"tokenizer: expected a Tokenizer, .*; got {type(other).__name__}"):
            build_store(tmp_path / "t", TEXTS, other)


def test_rows_of_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"body": TEXTS, "url": list("abcd"), "lang": ["en"] * 4})
    tokenizer = Tokenizer.train(TEXTS, 300)
    store = build_store(tmp_path / "a", rows, tokenizer, chunk_len=4, text_field="body")
    again = build_store(tmp_path / "b", iter(TEXTS), tokenizer, chunk_len=4)
    streamed = build_store(tmp_path / "c", rows.to_iterable_dataset(), tokenizer, chunk_len=4, text_field="body")
    assert store.identity == again.identity == streamed.identity
    with pytest.raises(ValueError, match="expected a field of the rows; got 'text', row 0 has 'body', 'url', 'lang'"):
        build_store(tmp_path / "d", rows, tokenizer)
    with pytest.raises(TypeError, match=r"documents: expected .* rows .*; got a DatasetDict of the splits 'train'"):
        build_store(tmp_path / "e", datasets.DatasetDict(train=rows), tokenizer)


def test_rows_are_known_again_by_what_they_hold():
    """The same text in another order has the same name; a second copy has another."""
    names = [d.name for d in as_documents(TEXTS)]
    again = {d.content: d.name for d in as_documents(reversed([{"text": t} for t in TEXTS[1:]]))}
    assert len(set(names)) == 4 and names[2] == f"{names[0]}-2"
    assert [again[t] for t in (TEXTS[0], TEXTS[1], TEXTS[3])] == [names[0], names[1], names[3]]


@pytest.mark.parametrize(
    "rows, message",
    [
        ([3], "row 0: expected a dict with 'text', a string, or .*; got int"),
        (["a", {"text": None}], "row 1: expected text or token ids in 'text'; got NoneType"),
        ("one text", "documents: expected an iterable of rows .*; got str"),
    ],
)
def test_other_rows_are_refused_by_name(rows, message):
    with pytest.raises(TypeError, match=message):
        list(as_documents(rows))
