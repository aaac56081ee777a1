"""Model folders from elsewhere: a file that is not a regular file is refused by name, and a pipe does not block."""

import os
import shutil

import pytest

from retro_model.folders.reader import Options, open_folder

from . import made as folders


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def folder(path):
    path.unlink()
    path.mkdir()


def half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("change", [pipe, link, folder, half])
def test_each_file_of_a_model_folder(tmp_path, change):
    whole = tmp_path / "whole"
    whole.mkdir()
    folders.retro(whole)
    names = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    assert len(names) > 8
    for number, name in enumerate(names):
        changed = shutil.copytree(whole, tmp_path / str(number))
        change(changed / name)
        with pytest.raises((FileNotFoundError, ValueError), match=str(changed)):
            reader = open_folder(changed)
            reader.score(reader.passage(0), Options())
