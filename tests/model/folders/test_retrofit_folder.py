"""A small decoder from a local folder: retrofitted by the command, then read like a RETRO."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from retro_model.commands.options import Sizes
from retro_model.commands.retrofit import command as retrofit
from retro_model.folders.reader import Options, open_folder

from . import made as folders

transformers = pytest.importorskip("transformers")
SIZES = Sizes(chunk_len=16, window=64, stride=32, dim=64)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The decoder's folder, and the model folder made by the command."""
    decoder, texts, out = (tmp_path_factory.mktemp(name) for name in ("tiny", "texts", "out"))
    folders.decoder(decoder)
    for name, _, text in folders.texts():
        (texts / name.replace("<b>", "").replace(".html", ".md")).write_text(text)
    retrofit.run(decoder, out, SIZES, steps=4, folder_of_texts=texts)
    return decoder, out


def test_off_is_the_decoder_as_it_was(made):
    decoder, out = made
    reader = open_folder(out)
    ids = reader.passage(reader.start)
    got = reader.score(ids, Options())
    plain = transformers.AutoModelForCausalLM.from_pretrained(decoder).eval()
    tokens = torch.from_numpy(ids)[None]
    with torch.no_grad():
        wanted = F.cross_entropy(plain(tokens).logits[0, :-1], tokens[0, 1:], reduction="none") / np.log(2)
    np.testing.assert_allclose(got.off[1:], wanted, rtol=1e-4, atol=1e-4)
    assert np.abs(got.on - got.off).max() > 1e-4  # the added weights have learned something
    assert "".join(got.texts) == reader.tokenizer.decode_bytes(ids).decode()
    assert got.cards[0] and got.cards[0][0]["name"].endswith((".txt", ".md"))


def test_it_is_asked_and_its_library_changes_like_any_other(made):
    reader = open_folder(made[1])
    assert reader.without == "the decoder as it was"
    reading, _ = reader.write(reader.encode("The harbour moved the"), Options(new_tokens=6))
    assert len(reading.texts) == reading.extra["prompt_tokens"] + 6
    with pytest.raises(ValueError, match="question: expected a model that was taught to answer"):
        reader.answer("Who moved?", Options())
    number = reader.library.add("new.txt", reader.tokenizer.decode_bytes(reader.held_out.document_tokens(0)).decode())
    assert {card["document"] for cards in reader.score(reader.passage(0), Options(k=1)).cards for card in cards} == {
        number
    }
    assert json.loads((made[1] / "model.json").read_text())["kind"] == "retrofit"


def test_what_it_claims_has_its_control(made):
    """Six files: one is held out, and one document gives no interval."""
    record = json.loads((made[1] / "retrofit.json").read_text())
    assert record["bits_per_byte"].keys() == {"off", "on", "random"}
    assert (
        record["verdict"].startswith("Too few to say")
        and record["verdict"] == open_folder(made[1]).folder.facts["verdict"]
    )
    assert record["on_minus_random"][0] == pytest.approx(
        record["bits_per_byte"]["on"] - record["bits_per_byte"]["random"], abs=1e-6
    )


def test_what_cannot_work_is_named(made, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        retrofit.run(tmp_path, tmp_path / "out", SIZES)
    (tmp_path / "texts").mkdir()
    with pytest.raises(ValueError, match="at least five files"):
        retrofit.run(made[0], tmp_path / "out", SIZES, folder_of_texts=tmp_path / "texts")
    with pytest.raises(SystemExit, match=r"retro-model retrofit: .*config"):
        retrofit.main([str(tmp_path)])


@pytest.mark.parametrize("inside", ["", "out", "deep/out"])
def test_results_never_become_documents(tmp_path, inside):
    (tmp_path / "note.txt").write_text("The harbour moved.")
    with pytest.raises(ValueError, match=r"--out .*: expected a folder outside of --texts"):
        retrofit.run(tmp_path, tmp_path / inside, SIZES, folder_of_texts=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


def test_a_folder_of_other_files_is_not_written_to(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "model.json").write_text("precious")
    with pytest.raises(ValueError, match=r"--out .*: expected a new or empty folder, or earlier results"):
        retrofit.run(tmp_path, mine, SIZES)
    with pytest.raises(ValueError, match=r"--out .*: expected a folder; got a file"):
        retrofit.run(tmp_path, mine / "model.json", SIZES)
    assert (mine / "model.json").read_text() == "precious" and len(list(mine.iterdir())) == 1
