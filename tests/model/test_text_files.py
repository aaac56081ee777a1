"""Files that people have: encodings, formats, links, copies and rows that cannot be read, through every command."""

import gzip
import json
import os
import sys

import numpy as np
import pytest

from retro_model.commands import neighbours
from retro_model.commands.retrofit import texts
from retro_model.data.database import ChunkDatabase
from retro_model.data.dedup import find_leaked
from retro_model.data.embed import HashedTfidf
from retro_model.data.neighbours import open_neighbours
from retro_model.data.shards import open_store
from retro_model.data.store import TokenStore, build_store
from retro_model.data.text_files import LeftOut, find_texts, read_rows, read_texts
from retro_model.data.tokens import Tokenizer
from tests.refusals import refused

CAFE = "Ein Café in Zürich\nund ein Haus\n"


def contents(*where, **options):
    return [document.content for document in read_texts(find_texts(where), **options)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be with a mark"])
def test_a_byte_order_mark_gives_the_encoding_and_is_dropped(tmp_path, encoding):
    mark = "\ufeff" if "with" in encoding else ""
    encode = lambda text: (mark + text).encode(encoding.split()[0])  # noqa: E731
    (tmp_path / "a.txt").write_bytes(encode(CAFE))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(encode(CAFE + "c")))
    (tmp_path / "d.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({"text": CAFE + "d"}).encode() + b"\n")
    assert contents(tmp_path) == [CAFE, CAFE + "c", CAFE + "d"]


@pytest.mark.parametrize(
    "data, message",
    [
        (CAFE.encode("latin-1"), r"{path}, line 1: expected UTF-8; got the byte 0xe9; .*iconv -f ISO-8859-1"),
        ("Haus\n".encode("utf-16-le"), r"{path}: expected text; got NUL bytes, as in .* UTF-16 .*iconv.*-f UTF-16LE"),
        (bytes(64), r"{path}: expected text; got NUL bytes"),
        (b"\xff\xfe\0\xd8", r"{path}: expected UTF-16; got the byte 0x00"),
        (b"%PDF-1.4\nnothing", r"{path}: expected text; got a PDF; leave it out"),
        (b"\x01\x02\x03 and a few words", r"{path}: expected text; got 3 control characters; leave it out"),
    ],
    ids=["latin-1", "utf-16-le", "zeros", "truncated", "pdf", "binary"],
)
def test_a_file_that_is_not_text_is_named_with_its_remedy(tmp_path, data, message):
    path = tmp_path / "old.txt"
    path.write_bytes(data)
    (tmp_path / "good.txt").write_text(CAFE)
    refused(message.format(path=path), contents, tmp_path)
    left_out, said = LeftOut(), []
    assert contents(tmp_path, left_out=left_out) == [CAFE]
    left_out.report(said.append)
    assert len(said) == 1 and str(path) in said[0]
    refused("texts: expected files that can be read", left_out.report, said.append, strict=True)


def test_suffixes_of_any_case_say_what_a_file_holds(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    row = lambda text: json.dumps({"text": text})  # noqa: E731
    for name in ("A.TXT", "B.Md", "c.rst", "d.py"):
        (tmp_path / name).write_text(f"text of {name}\r\nand more")
    for name in ("e.JSONL", "f.ndjson"):
        (tmp_path / name).write_text(f"{row(name)}\r\n\n{row(name + '2')}")
    (tmp_path / "g.jsonl.GZ").write_bytes(gzip.compress(row("g").encode()))
    parquet.write_table(pyarrow.table({"text": ["h", "h2"], "other": [1, 2]}), tmp_path / "h.parquet")
    (tmp_path / "page.html").write_text("<p>")
    left_out = LeftOut()
    found = [d.content for d in read_texts(find_texts([tmp_path], left_out=left_out), left_out=left_out)]
    plain = [f"text of {name}\nand more" for name in ("A.TXT", "B.Md", "c.rst", "d.py")]
    assert found == [*plain, "e.JSONL", "e.JSONL2", "f.ndjson", "f.ndjson2", "g", "h", "h2"]
    assert left_out.others == {".html": 1} and not left_out.unreadable
    said = []
    left_out.report(said.append)
    assert said == ["files of other kinds, not read (1): .html (1)"]
    (tmp_path / "k.json").write_text(f"{row('k')}\n{row('k2')}\n")
    assert contents(tmp_path / "k.json") == ["k", "k2"]
    refused(r"h\.parquet, row 0 has 'text', 'other'", contents, tmp_path / "h.parquet", text_field="body")


def test_a_damaged_archive_or_table_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    whole = gzip.compress(os.urandom(5000).hex().encode())
    damaged = {"a.txt.gz": whole[:-3000], "b.txt.gz": b"text", "e.parquet": b"text", "f.parquet.gz": whole}
    for name, data in damaged.items():
        (tmp_path / name).write_bytes(data)
        refused(f"{name}: expected a", contents, tmp_path / name)
    left_out = LeftOut()
    assert not contents(tmp_path, left_out=left_out)
    assert len(left_out.unreadable) == len(damaged)


def test_a_row_that_cannot_be_read_is_named_by_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": "good"}), '{"text": "\\ud800"}', '{"text": ""}', '{"text": " "}', '{"text": null}']
    lines += ["{", '{"title": "x"}', "[" * 10000, "3", '{"text": [[1], [2, 3]]}', json.dumps({"text": "last"})]
    path.write_bytes("\n".join(lines).encode() + b'\n{"text": "\xe9"}\n')
    left_out = LeftOut()
    assert contents(path, left_out=left_out) == ["good", "last"]
    wanted = [
        "line 2: expected text that UTF-8 can hold; got the lone surrogate U+D800 as character 1",
        "line 3: expected at least one token; got an empty text",
        "line 4: expected text in 'text'; got white space alone",
        "line 5: expected text or token ids in 'text'; got NoneType",
        "line 6: expected JSON; got a value that cannot be read: Expecting property name enclosed in double quotes",
        "line 7 has 'title'",
        "line 8: expected JSON; got a value that cannot be read: it is nested too deeply",
        "line 9: expected a dict with 'text', a string, or (name, group, content); got int",
        "line 10: expected text or integer token ids; got lists of different lengths",
        "line 12: expected UTF-8; got the byte 0xe9; leave it out, or convert it",
    ]
    assert len(left_out.unreadable) == len(wanted)
    for message, want in zip(left_out.unreadable, wanted):
        assert f"{path}, " in message and want in message
    refused(r"rows\.jsonl, line 2: expected text that UTF-8 can hold", contents, path)
    again = read_texts([path], places=left_out.places)  # a second reading needs only the places
    assert [document.content for document in again] == ["good", "last"]


def test_a_file_is_read_once_whatever_links_lead_to_it(tmp_path):
    real = tmp_path / "z"
    real.mkdir()
    (real / "a.txt").write_text("text of a")
    (real / "b.txt").write_text("text of b")
    (real / "loop").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to("self")
    (tmp_path / "first").symlink_to(real)
    for name in ("a-link.txt", "zz-link.txt"):  # sorted before and after the file
        (tmp_path / name).symlink_to(real / "a.txt")
    os.link(real / "b.txt", tmp_path / "b-hard.txt")
    for where in (tmp_path, tmp_path / "**" / "*.txt"):
        left_out = LeftOut()
        found = find_texts([where], left_out=left_out)
        assert sorted(path.name for path in found) == ["a-link.txt", "b-hard.txt", "b.txt"], where
        assert all("self" in message for message in left_out.unreadable)
        texts = [document.content for document in read_texts(found, left_out=left_out)]
        assert texts == ["text of a", "text of b"]  # a hard link is a copy
    (tmp_path / "nothing.txt").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    for name in ("nothing", "pipe"):
        message = rf"{name}\.txt: expected a regular file; got a broken link, a device or a pip"
        refused(message, find_texts, [tmp_path / f"{name}*"])


def test_names_and_patterns(tmp_path):
    for name in ("b.py", "a/c.py", "a[1].py", ".hidden/e.py"):
        path = tmp_path / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}")
    found = find_texts([str(tmp_path / "src" / "**" / "*.py")])
    assert [path.relative_to(tmp_path / "src").as_posix() for path in found] == ["a/c.py", "a[1].py", "b.py"]
    assert find_texts([tmp_path / "src" / "a[1].py"]) == [tmp_path / "src" / "a[1].py"]
    with pytest.raises(FileNotFoundError, match=r"documents: expected files; got none for .*nothing"):
        find_texts([tmp_path / "nothing*"])


COPIES = [
    "Ein Café\n  hier  \nund dort\n",
    "Ein Cafe\u0301\r\n  hier\r\nund dort",
    "\ufeffEin Café\n  hier\t\nund dort\n\n",
]


def test_copies_are_left_out_and_counted(tmp_path):
    for number, text in enumerate(COPIES):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    rows = [*COPIES, "another"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    left_out, said = LeftOut(), []
    assert contents(tmp_path, left_out=left_out) == [COPIES[0], "another"]
    left_out.report(said.append, strict=True)
    assert said == [
        f"copies of earlier documents, left out (5): {tmp_path / '1.txt'}, {tmp_path / '2.txt'}, "
        + ", ".join(f"{tmp_path / 'rows.jsonl'}, line {line}" for line in (1, 2, 3))
    ]


@pytest.mark.parametrize("change", [lambda t: t.replace("\n", "\r\n"), lambda t: t.replace("\n", "  \n"), "NFD"])
def test_a_copy_with_other_line_ends_spaces_or_unicode_form_is_a_near_duplicate(tmp_path, change):
    import unicodedata

    text = "\n".join(f"Zürich café line {i} of {i * i}" for i in range(40))
    copy = unicodedata.normalize("NFD", text) if change == "NFD" else change(text)
    tokenizer = Tokenizer.train([text, "abc " * 50], 320)
    training = build_store(tmp_path / "t", [("copy", "", copy + "\nmore"), ("other", "", "abc " * 50)], tokenizer)
    held = build_store(tmp_path / "h", [("held", "", text)], tokenizer)
    found = find_leaked(training, [held], tokenizer=tokenizer).removed
    assert [removal.name for removal in found] == ["copy"] and 0.9 < found[0].jaccard < 1
    assert not find_leaked(training, [held]).removed  # token by token it is another text


def corpus(folder):
    folder.mkdir()
    words = [" ".join(f"word{(i * j) % 11} and" for j in range(1, 14)) for i in range(1, 7)]
    rows = [*words, words[0], words[1] + " "]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows) + '{"text": ""}\n')
    (folder / "copy.txt").write_text(words[2] + "\n")
    (folder / "old.txt").write_bytes(CAFE.encode("latin-1"))
    (folder / "new.txt").write_bytes(f"{CAFE} {words[5]}".encode("utf-16"))
    return folder


@pytest.mark.parametrize("shards", [1, 2])
def test_neighbours_names_what_it_leaves_out_and_no_chunk_finds_its_copy(tmp_path, capsys, shards):
    texts_folder = corpus(tmp_path / "texts")
    options = ["--documents", str(texts_folder / "*"), "--tokenizer", "train:270", "--chunk-len", "8", "-k", "2"]
    options += ["--shards", str(shards)]
    with pytest.raises(SystemExit, match=r"(?s)retro-model neighbours: texts: .*old\.txt.*rows\.jsonl, line 9"):
        neighbours.main([str(tmp_path / "strict"), *options, "--strict"])
    assert not (tmp_path / "strict" / "store").exists()
    for _ in range(2):
        neighbours.main([str(tmp_path / "run"), *options])
        said = capsys.readouterr().out
        assert "old.txt, line 1: expected UTF-8" in said and "rows.jsonl, line 9: expected at least one token" in said
        assert "copies of earlier documents, left out (3)" in said and "7 documents" in said
    store = open_store(tmp_path / "run" / "store")
    database = ChunkDatabase.open(tmp_path / "run" / "keys", store, HashedTfidf.load(tmp_path / "run" / "embedder.npz"))
    near = np.asarray(open_neighbours(tmp_path / "run" / "neighbours", store, database))
    whole = np.asarray(store.lengths) == 8
    same = [(store.chunks([i]) == store.chunks(near[i])).all(1).any() for i in np.flatnonzero(whole)]
    assert same and not any(same)


def test_a_library_is_read_by_the_same_reader(tmp_path):
    said = []
    title, documents = texts.load(corpus(tmp_path / "notes"), show=said.append)
    assert title == "notes" and len(documents) == 7
    assert "new.txt" in {document.name for document in documents}
    assert not any("\0" in document.content for document in documents)
    assert any("old.txt" in line for line in said) and any("copies" in line for line in said)
    refused(r"old\.txt", texts.load, tmp_path / "notes", strict=True, show=said.append)


def test_rows_are_read_by_the_same_reader(tmp_path):
    rows = [{"text": CAFE, "more": 1}, {"text": "a b"}]
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    assert [row for _, row in read_rows(path)] == rows
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "a b"}\n3\n')
    refused(r"bad\.jsonl, line 2: expected an object; got int", list, read_rows(path))
    (tmp_path / "rows.txt").write_text("{}")
    refused(r"rows\.txt: expected a file of rows", list, read_rows(tmp_path / "rows.txt"))


def test_token_ids_are_rows_too(tmp_path):
    (tmp_path / "ids.jsonl").write_text('{"text": [2, 3, 4]}\n{"text": [2, 3, 4]}\n{"text": [5]}\n')
    found = contents(tmp_path)
    assert [ids.tolist() for ids in found] == [[2, 3, 4], [5]]
    store = build_store(tmp_path / "s", read_texts(find_texts([tmp_path])), Tokenizer.train(["a"], 258), chunk_len=2)
    assert TokenStore(tmp_path / "s").num_tokens == store.num_tokens == 4


def write_pdf(path, text: str) -> None:
    """Write a PDF of one page."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    figure.text(0.1, 0.5, text)
    figure.savefig(path)


def test_a_pdf_is_read_by_pypdf(tmp_path):
    pytest.importorskip("pypdf")
    write_pdf(tmp_path / "letter.pdf", "The boiler needs 1.7 bar")
    write_pdf(tmp_path / "scan.pdf", "")
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.4\nnothing")
    left_out = LeftOut()
    documents = list(read_texts(find_texts([tmp_path]), root=tmp_path, left_out=left_out))
    assert [(d.name, d.content.strip()) for d in documents] == [("letter.pdf", "The boiler needs 1.7 bar")]
    assert left_out.empty == [str(tmp_path / "scan.pdf")]
    assert len(left_out.unreadable) == 1 and "broken.pdf: expected a PDF that can be read" in left_out.unreadable[0]


def test_without_pypdf_a_pdf_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdf", None)
    (tmp_path / "letter.pdf").write_bytes(b"%PDF-1.4")
    with pytest.raises(ValueError, match=r"letter\.pdf: expected pypdf, which reads PDF; .*; pip install pypdf"):
        list(read_texts([tmp_path / "letter.pdf"]))
