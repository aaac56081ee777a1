"""Folders of a small decoder that the command retrofits: read like a RETRO, and asked about a few notes."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from retro_model.commands.compare import questions as compared
from retro_model.commands.options import Sizes
from retro_model.commands.retrofit import command as retrofit
from retro_model.data.hub import HubTokenizer
from retro_model.folders import questions
from retro_model.folders.reader import Options, open_folder
from tests.model.folders import made as folders
from tests.refusals import refused

transformers = pytest.importorskip("transformers")
SIZES = ["--chunk-len", "16", "--window", "64"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The decoder's folder, the notes, the model folder and the lines that the command printed."""
    decoder, notes, out = (tmp_path_factory.mktemp(name) for name in ("tiny", "notes", "out"))
    folders.chatting_decoder(decoder)
    folders.write_notes(notes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrofit, "fit", lambda *_: pytest.fail("trained on nothing"))
        retrofit.main([str(decoder), "--texts", str(notes), "--out", str(out), *SIZES])
    return decoder, notes, out


def test_a_small_folder_is_ready_without_training(made):
    reader = open_folder(made[2])
    assert reader.about()["facts"]["summary"] == "Reads 3 documents; none was held out."
    assert reader.passages == [] and {entry.name for entry in reader.library.documents} == {*folders.NOTES}


def test_held_out_documents_are_named(made, tmp_path, capsys):
    notes = tmp_path / "notes"
    notes.mkdir()
    for number in range(3):
        (notes / f"{number}.md").write_text(f"# {number}\n\nNothing here resembles the others, {number}{number}.\n")
    folders.write_notes(notes)
    options = ["--held-out", "1", "--steps", "0", "--least-similarity", "0.99"]
    retrofit.main([str(made[0]), "--texts", str(notes), "--out", str(tmp_path / "out"), *SIZES, *options])
    said = capsys.readouterr().out
    assert "on minus off" in said and "95%" not in said
    assert "the limit is 0.99; nothing is trained; lower the limit: --least-similarity 0." in said
    assert "Reads 5 documents; 1 was kept for the test: " in open_folder(tmp_path / "out").about()["facts"]["summary"]


@pytest.mark.parametrize(
    ("question", "name"),
    [("How many bar does the boiler need?", "boiler.md"), ("What is the cat called?", "cat.md"), ("keys?", "keys.md")],
)
def test_the_right_passage_is_found_first(made, question, name):
    found = open_folder(made[2]).find(question, Options())
    assert found["cards"][0]["name"] == name and found["best"] == found["cards"][0]["score"] > 0.3
    assert found["read"] >= 1 and name.split(".")[0].capitalize() in "".join(found["cards"][0]["texts"])


def test_a_blank_question_is_refused(made):
    refused("text: expected some text", open_folder(made[2]).answer, "  \n ", Options())


def test_nothing_is_read_below_the_limit(made):
    reader = open_folder(made[2])
    found = reader.find("What does the cat drink on Mondays?", Options(least=1.0))
    assert found["read"] == 0 and found["limit"] == 1.0 and 0 < found["best"] < 1
    assert reader.find("What is the cat called?", Options(retrieval=False))["read"] == 0
    assert reader.find("zzz qqq", Options()) == {"cards": [], "best": 0.0, "limit": 0.1, "read": 0}


def test_the_answer_is_the_decoders_own_with_the_passages_in_its_prompt(made):
    reader, said = open_folder(made[2]), []
    got = reader.answer("What is the cat called?", Options(k=1, new_tokens=6), said.append)
    passage = "".join(got["cards"][0]["texts"])
    prompt = questions.chat_prompt(reader.tokenizer, questions.with_passages("What is the cat called?", [passage]))
    plain = transformers.AutoModelForCausalLM.from_pretrained(made[0]).eval()
    with torch.no_grad():
        wanted = plain.generate(torch.from_numpy(prompt)[None], max_new_tokens=6, do_sample=False)[0, len(prompt) :]
    text = reader.tokenizer.decode_bytes([t for t in wanted.tolist() if t != reader.stop_token]).decode()
    assert got["answer"] == text == said[-1] and 1 <= len(said) <= 6


def test_the_search_follows_the_library(made):
    reader = open_folder(made[2])
    ask = lambda: [card["name"] for card in reader.find("What is the cat called?", Options())["cards"]]  # noqa: E731
    assert ask()[0] == "cat.md"
    reader.library.forget(next(n for n, entry in enumerate(reader.library.documents) if entry.name == "cat.md"))
    assert "cat.md" not in ask()
    reader.library.add("new.md", "The new cat is called Doctor Crumb.")
    assert ask()[0] == "new.md"
    reader.library.reset()
    assert ask()[0] == "cat.md"
    refused(r"text: expected a text file; got a PDF in scan\.pdf", reader.library.add, "scan.pdf", "%PDF-1.4 scan")


def test_an_encoder_finds_words_of_another_form(made):
    reader = open_folder(made[2])
    encode = lambda texts: np.array([[float("feline" in t or "cat" in t.lower()), 0.1] for t in texts])  # noqa: E731
    search = questions.QuestionSearch(reader.library, encode)
    assert reader.library.place(int(search.search("feline", 1)[0][0])).name == "cat.md"
    assert questions.QuestionSearch(reader.library).search("feline", 1)[0].tolist() == [-1]


@pytest.mark.parametrize("question", ["a", "What is the cat called?"])
@pytest.mark.parametrize("size", [4, 16, 64])
def test_every_token_of_the_question_reads(made, question, size):
    tokenizer = HubTokenizer.load(made[0])
    prompt, plain = questions.reading_chat(tokenizer, question, size, 7), questions.chat_prompt(tokenizer, question)
    bare, fillers = questions.chat_prompt(tokenizer, ""), len(prompt) - len(plain)
    at = next(i for i, token in enumerate(plain) if i == len(bare) or plain[i] != bare[i])
    assert np.delete(prompt, range(at, at + fillers)).tolist() == plain.tolist()
    first = at + fillers  # the question's first token; token p reads the neighbours of chunk (p+1) // M - 1
    assert (first + 1) // size - 1 >= 0 and (fillers == 0 or first // size - 1 < 0)


def test_a_reply_declines():
    unknown = ("The notes do not mention the roof.", "I don't know.", "There is no information about a dog in them.")
    assert all(map(questions.declines, (*unknown, "I cannot tell how old the roof is.")))
    told = ("The roof is not old.", "The roof is 30 years old. It is stated there.", "No. The notes mention it.")
    assert not any(map(questions.declines, told))


def test_an_answer_is_whole_words():
    assert questions.says("It needs 1.7 bar.", ["1.7"]) and not questions.says("It needs 11.7 bar.", ["1.7"])
    assert questions.says("professor BISCUIT!", ["Professor Biscuit"]) and not questions.says("12", ["2"])


def test_questions_are_compared(made, tmp_path, monkeypatch):
    rows = [
        {"kind": "direct", "question": "What is the cat called?", "answers": ["Professor Biscuit"]},
        {"kind": "unanswerable", "question": "How old is the roof?", "answers": []},
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(compared, "NEW_TOKENS", 2)
    sizes = Sizes(chunk_len=16, window=64, dim=64)
    found = compared.run(made[0], compared.read_questions(path), made[1], tmp_path, sizes, gates=made[2])
    assert found["contenders"].keys() == compared.CONTENDERS.keys() and found["answerable"] == 1
    assert found["recall"] == {"1": 1.0, "2": 1.0, "4": 1.0}
    assert all([*row["by_kind"]] == ["direct", "unanswerable"] for row in found["contenders"].values())
    assert "among those found: 100% with 1" in (tmp_path / "questions.md").read_text()
    path.write_text("{}")
    refused(r"--questions: expected question and answers, a list; .*, line 1", compared.read_questions, path)


def test_trained_gates_are_those_of_the_folder(made, tmp_path):
    sizes = Sizes(chunk_len=16, window=64, dim=64)
    plain, gated = compared.Answerer(made[0], sizes), compared.Answerer(made[0], sizes, made[2])
    assert [name for name in gated.names if name not in plain.names] == ["own-gates", "own-gates-random"]
    bias, scale = gated.gates[True]
    assert (bias == -1).all() and (scale == 1).all() and (gated.gates[False][0] == 0).all()  # trained for 0 steps
    notes = compared.open_notes(made[1], tmp_path, gated.tokenizer, sizes, None)
    gated.reply("own-gates", notes, "What is the cat called?", np.array([1, 0]))
    assert torch.equal(gated.model.bias.detach(), bias)
    gated.reply("own-whole", notes, "What is the cat called?", np.array([1, 0]))
    assert (gated.model.bias == 0).all()


SMALL = Sizes(chunk_len=16, window=64, stride=32, dim=64)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """The decoder's folder, and the model folder made by the command."""
    decoder, texts, out = (tmp_path_factory.mktemp(name) for name in ("tiny", "texts", "out"))
    folders.decoder(decoder)
    for name, _, text in folders.texts():
        (texts / name.replace("<b>", "").replace(".html", ".md")).write_text(text)
    retrofit.run(decoder, out, SMALL, steps=4, folder_of_texts=texts)
    return decoder, out


def test_off_is_the_decoder_as_it_was(fitted):
    decoder, out = fitted
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


def test_it_is_asked_and_its_library_changes_like_any_other(fitted):
    reader = open_folder(fitted[1])
    assert reader.without == "the decoder as it was"
    reading, _ = reader.write(reader.encode("The harbour moved the"), Options(new_tokens=6))
    assert len(reading.texts) == reading.extra["prompt_tokens"] + 6
    refused("question: expected a model that was taught to answer", reader.answer, "Who moved?", Options())
    number = reader.library.add("new.txt", reader.tokenizer.decode_bytes(reader.held_out.document_tokens(0)).decode())
    assert {card["document"] for cards in reader.score(reader.passage(0), Options(k=1)).cards for card in cards} == {
        number
    }
    assert json.loads((fitted[1] / "model.json").read_text())["kind"] == "retrofit"


def test_what_it_claims_has_its_control(fitted):
    """Six files: one is held out, and one document gives no interval."""
    record = json.loads((fitted[1] / "retrofit.json").read_text())
    assert record["bits_per_byte"].keys() == {"off", "on", "random"}
    assert (
        record["verdict"].startswith("Too few to say")
        and record["verdict"] == open_folder(fitted[1]).folder.facts["verdict"]
    )
    assert record["on_minus_random"][0] == pytest.approx(
        record["bits_per_byte"]["on"] - record["bits_per_byte"]["random"], abs=1e-6
    )


def test_what_cannot_work_is_named(fitted, tmp_path):
    refused(r"config\.json", retrofit.run, tmp_path, tmp_path / "out", SMALL, error=FileNotFoundError)
    (tmp_path / "texts").mkdir()
    refused("at least five files", retrofit.run, fitted[0], tmp_path / "out", SMALL, folder_of_texts=tmp_path / "texts")
    refused(r"retro-model retrofit: .*config", retrofit.main, [str(tmp_path)], error=SystemExit)


@pytest.mark.parametrize("inside", ["", "out", "deep/out"])
def test_results_never_become_documents(tmp_path, inside):
    (tmp_path / "note.txt").write_text("The harbour moved.")
    with pytest.raises(ValueError, match=r"--out .*: expected a folder outside of --texts"):
        retrofit.run(tmp_path, tmp_path / inside, SMALL, folder_of_texts=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


def test_a_folder_of_other_files_is_not_written_to(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "model.json").write_text("precious")
    refused(r"--out .*: expected a new or empty folder, or earlier results", retrofit.run, tmp_path, mine, SMALL)
    refused(r"--out .*: expected a folder; got a file", retrofit.run, tmp_path, mine / "model.json", SMALL)
    assert (mine / "model.json").read_text() == "precious" and len(list(mine.iterdir())) == 1
