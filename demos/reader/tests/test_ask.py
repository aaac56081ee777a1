"""`retro-reader ask`: its output, its files, and control characters of texts and names."""

import json

import pytest

from retro_model.folders.reader import open_folder
from retro_reader import __main__ as program
from retro_reader import ask
from tests.model.folders import made as folders


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return {"retro": folders.retro(tmp_path_factory.mktemp("retro"))}


def test_in_the_terminal(paths, capsys, tmp_path):
    ask.main([str(paths["retro"])])
    said = capsys.readouterr().out
    assert "port.txt, from line 1: the model has not seen it" in said and "harbour.txt" in said and "fewer bits" in said
    file = tmp_path / "file.txt"
    file.write_text(folders.texts()[0][2])
    ask.main([str(paths["retro"]), "--forget", "harbour.txt", "--add", str(file)])
    assert "file.txt" in capsys.readouterr().out
    ask.main([str(paths["retro"]), "--off"])
    said = capsys.readouterr().out
    assert "No passage was read" in said and "What was looked up" not in said and "It had read" not in said
    ask.main([str(paths["retro"]), "The harbour", "--tokens", "4"])
    said = capsys.readouterr().out
    assert "It wrote the bold words itself" in said and "fewer bits" not in said and "more bits" not in said
    assert "retrieval off, it writes" in said
    for wrong, named in (
        (["--forget", "nothing.txt"], "nothing.txt"),
        (["-k", "99"], "k: expected"),
        (["--passage", "77"], "passage"),
    ):
        with pytest.raises(SystemExit, match=named):
            ask.main([str(paths["retro"]), *wrong])


def test_an_added_file_is_read_as_every_text_or_refused_by_name(paths, tmp_path, capsys):
    text = "The captain lost the rope near the café.\n" * 9
    (tmp_path / "utf16.txt").write_bytes(text.encode("utf-16"))
    (tmp_path / "latin.txt").write_bytes(text.encode("latin-1"))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": text}) + "\n")
    (tmp_path / "ids.jsonl").write_text('{"text": [3, 4]}\n')
    (tmp_path / "empty.txt").write_text(" ")
    reader = open_folder(paths["retro"])
    before = len(reader.library.documents)
    ask._change(reader, [], [str(tmp_path / name) for name in ("utf16.txt", "rows.jsonl")])
    [added, row] = reader.library.documents[before:]
    assert added.num_bytes == row.num_bytes == len(text.encode()) and row.name.endswith("rows.jsonl, line 1")
    messages = {"latin.txt": r"latin\.txt, line 1: expected UTF-8", "ids.jsonl": "--add: expected text; got token ids"}
    messages |= {"empty.txt": "--add: expected a file with text", "nothing.txt": "got none for", ".": "expected UTF-8"}
    for name, message in messages.items():
        with pytest.raises(SystemExit, match=message):
            ask.main([str(paths["retro"]), "--add", str(tmp_path / name)])


def test_no_escape_of_a_text_or_a_name_reaches_the_terminal(tmp_path, capsys):
    """A title that is set, a cursor that moves, a line shown backwards."""
    hostile = "harbour\x1b]0;taken over\x07\x1b[2J\x9b31m\u202egnihtemos\r\x00"
    folder = folders.retro(tmp_path)
    file = tmp_path / "a\x1b[2Jb.txt"
    file.write_text(f"{hostile} ".replace("\0", "") * 40)
    ask.main([str(folder), f"The {hostile} moved the crane near the harbour", "--tokens", "4", "--add", str(file)])
    said = capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        ask.main([str(folder), "--forget", hostile])
    for text in (said, str(stopped.value)):
        assert not set(text) & set("\x1b\x07\x9b\r\x00\u202e") and "taken over" in text
    assert "\u241b]0;taken over\u2407" in said


def test_the_program_names_its_commands(capsys):
    no_such = "retro-reader: expected one of serve, ask; got show"
    for words, code, said in (([], 2, "  serve"), (["show"], 2, no_such), (["ask", "--help"], 0, "retro-reader ask")):
        with pytest.raises(SystemExit) as stopped:
            program.main(words)
        assert stopped.value.code == code and said in "".join(capsys.readouterr())
