"""The command `neighbours`: tiny runs against the functions that it calls."""

import json

import numpy as np
import pytest
import torch

from retro_model.commands import neighbours
from retro_model.commands.__main__ import COMMANDS, parser
from retro_model.commands.options import Sizes
from retro_model.data.database import ChunkDatabase
from retro_model.data.embed import EncoderEmbedder, HashedTfidf, retokenized
from retro_model.data.neighbours import open_neighbours
from retro_model.data.store import TokenStore
from retro_model.data.tokens import Tokenizer
from retro_reader import options

TEXTS = [" ".join(f"word{(i * j) % 7} and" for j in range(12)) for i in range(1, 9)]


def bert(folder):
    """A frozen encoder and its tokenizer, as `from_pretrained` finds them."""
    transformers = pytest.importorskip("transformers")
    import tokenizers

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "and", *(f"word{i}" for i in range(7))]
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="[UNK]", pad_token="[PAD]")
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    encoder = transformers.BertModel(transformers.BertConfig(**sizes, max_position_embeddings=64))
    for part in (fast, encoder):
        part.save_pretrained(folder)
    return encoder, fast


@pytest.mark.parametrize("encoder", ["bert", "tfidf"])
def test_neighbours_by_a_frozen_encoder(tmp_path, capsys, encoder):
    documents = tmp_path / "corpus.jsonl"
    documents.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    made = bert(tmp_path / "bert") if encoder == "bert" else None
    if made:
        pytest.importorskip("transformers").utils.logging.enable_progress_bar()
        capsys.readouterr()
    options = ["--documents", str(documents), "--text-field", "body", "--tokenizer", "train:270"]
    options += ["--chunk-len", "8", *(["--encoder", str(tmp_path / "bert")] if made else [])]
    arguments = [str(tmp_path / "run"), *options, "-k", "3"]
    for _ in range(2):  # the second run finds everything finished
        neighbours.main(arguments)
    with pytest.raises(SystemExit, match="--shards: expected at most one for each of 1 files; got 2"):
        neighbours.main([str(tmp_path / "sharded"), *options, "--shards", "2"])
    with pytest.raises(SystemExit, match="neighbours: shards: expected an int >= 1; got 0"):
        neighbours.main([str(tmp_path / "none"), *options, "--shards", "0"])
    assert not (tmp_path / "none").exists()
    store = TokenStore(tmp_path / "run" / "store")
    tokenizer = Tokenizer.load(tmp_path / "run" / "tokenizer.json")
    embedder = (
        EncoderEmbedder(made[0], prepare=retokenized(tokenizer.decode, made[1])) if made else HashedTfidf().fit(store)
    )
    database = ChunkDatabase.open(tmp_path / "run" / "keys", store, embedder)
    ids = open_neighbours(tmp_path / "run" / "neighbours", store, database)
    want = database.search(store.chunks(np.arange(len(store))), 3, lengths=store.lengths, exclude_doc=store.chunk_doc)
    assert np.array_equal(ids, want) and len(store.documents) == len({*TEXTS})
    said, bars = capsys.readouterr()
    assert f"keys: {embedder.name}" in said and "Loading" not in bars


#: Commands whose default differs, with the reason in the option's help.
OWN_DEFAULTS = {"neighbours": {"chunk_len", "neighbours"}, "ask": {"neighbours"}}
OWN_DEFAULTS |= {"retrofit": {"held_out", "out"}}


def test_commands_share_words_and_defaults():
    parsers = {name: parser(name) for name in COMMANDS}
    parsers |= {"ask": options.ask(), "serve": options.serve()}
    words, defaults = {}, {}
    for command, made in parsers.items():
        for action in made._actions:
            if action.option_strings and action.dest != "help":
                words.setdefault(action.dest, {}).setdefault(tuple(action.option_strings), []).append(command)
                if action.dest not in OWN_DEFAULTS.get(command, ()):
                    defaults.setdefault(action.dest, {}).setdefault(str(action.default), []).append(command)
    assert {dest: found for dest, found in words.items() if len(found) > 1} == {}
    assert {dest: found for dest, found in defaults.items() if len(found) > 1} == {}
    assert words["neighbours"] == {("-k", "--neighbours"): ["retrofit", "compare", "neighbours", "ask"]}
    assert Sizes() == Sizes(chunk_len=32, window=256, held_out=20)
