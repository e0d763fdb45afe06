"""Your own files are read right or refused: names, encodings, line ends, JSON lines, token files."""

import json
import os
import pickle
import subprocess

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpt2.data.dataset import dataset_folder, open_dataset
from gpt2.data.own_files import OwnText, SourceFile, TokenFiles, decode, token_documents
from gpt2.data.prepare import prepare_dataset
from gpt2.data.tokenizer import ByteTokenizer


def read(path, data_format="text", field="text"):
    """Return name and text of each document."""
    return [(d.id, d.text) for d in OwnText.at(path, None, data_format, field).documents()]


def test_files_of_a_folder_and_of_folders_below(tmp_path):
    (tmp_path / "b.TXT").write_bytes(b"zwei\r\n")
    (tmp_path / "a.txt").write_bytes("één\n".encode())
    (tmp_path / "below" / ".hidden").mkdir(parents=True)
    (tmp_path / "below" / "a.txt").write_text("three")
    (tmp_path / "below" / ".hidden" / "copy.txt").write_text("not a document")
    assert read(tmp_path) == [("a.txt", "één\n"), ("b.TXT", "zwei\n"), ("below/a.txt", "three")]


def test_files_that_are_left_out_are_named(config, texts, tmp_path, capsys):
    (tmp_path / "texts" / "below").mkdir()
    for name in ("notes.md", "below/more.md", "LICENSE"):
        (tmp_path / "texts" / name).write_text("not a document")
    (tmp_path / "texts" / "linked").symlink_to(tmp_path)
    prepare_dataset(config(), tmp_path)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "not read" in line]
    assert line.startswith("WARN") and "2 *.md, 1 linked folder linked, 1 LICENSE" in line


@settings(max_examples=20)
@given(name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), max_size=9))
def test_any_file_name_is_the_name_of_a_document(name, tmp_path_factory):
    folder = tmp_path_factory.mktemp("named")
    (folder / f"a{name}.txt").write_text("text")
    assert read(folder) == [(f"a{name}.txt", "text")]


@pytest.mark.slow
@settings(max_examples=20)
@given(text=st.text())
@example(text="\ufeffsigned\r\nlines\r")
@example(text="a\ufeffb\u200b\u00ad\u202e")
def test_any_text_is_decoded_the_same_in_a_file_and_in_a_line(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    normal = text.replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff")
    (folder / "lines.jsonl").write_text(json.dumps({"text": text}) + "\r\n")
    assert read(folder / "lines.jsonl", "jsonl") == [("lines.jsonl:1", normal)]
    if text.count("\0") * 10 <= len(text.encode()):
        (folder / "a.txt").write_bytes(text.encode())
        assert read(folder / "a.txt") == [("a.txt", normal)]
        assert ByteTokenizer().decode(ByteTokenizer().encode(normal)) == normal


@pytest.mark.parametrize(
    ("encoding", "suggested"),
    [
        *(("utf-16", "UTF-16"), ("utf-32", "UTF-32"), ("utf-16-le", "UTF-16LE")),
        *(("utf-16-be", "UTF-16BE"), ("latin1", "latin1")),
    ],
)
def test_another_encoding_is_refused_with_the_command_that_converts_it(
    encoding, suggested, tmp_path, refused
):
    path = tmp_path / "in Zürich.txt"
    path.write_text("naïve café\n", encoding=encoding)
    problem = refused("data.invalid-format", lambda: read(path))
    assert problem.where == str(path) and f"iconv -f {suggested} " in problem.next
    command = problem.next.split("example: ")[1].split("; then")[0]
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert decode((tmp_path / "converted").read_bytes(), path) == "naïve café\n"


@pytest.mark.parametrize("data_format", ["text", "jsonl", "bin"])
def test_missing_files(data_format, config, tmp_path, refused):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "chapter.md").write_text("text")
    for path in ("none", "texts"):
        settings = config(custom_format=data_format, custom_path=path)
        problem = refused("data.missing", lambda: dataset_folder(settings, tmp_path))
        assert problem.where == str(tmp_path / path)
    assert ("train.bin and val" if data_format == "bin" else "1 *.md") in problem.what


def test_a_pipe_and_a_name_that_is_not_utf8(tmp_path, refused):
    os.mkfifo(tmp_path / "pipe.txt")
    refused("data.unreadable", lambda: OwnText.at(tmp_path, None, "text", "").identity())
    (tmp_path / os.fsdecode(b"z\xfcrich.txt")).write_text("text")
    assert "\\udcfc" in str(refused("data.invalid-format", lambda: read(tmp_path)))


def test_a_file_that_grows_while_it_is_read(config, texts, tmp_path, monkeypatch, refused):
    grown = tmp_path / "texts" / "11.txt"
    chunks = SourceFile.chunks

    def growing(self, lines=False):
        if self.path == grown:
            with open(grown, "a") as stream:
                stream.write("one more line\n")
        return chunks(self, lines)

    dataset_folder(config(), tmp_path)
    monkeypatch.setattr(SourceFile, "chunks", growing)
    problem = refused("data.changed", lambda: prepare_dataset(config(), tmp_path))
    assert problem.where == str(grown)
    assert [p.name for p in (tmp_path / "data").glob("*custom*")] == []


def write_tokens(folder, train, val):
    folder.mkdir(exist_ok=True)
    np.array(train, "<u2").tofile(folder / "train.bin")
    np.array(val, "<u2").tofile(folder / "val.bin")
    return folder


def test_a_vocabulary_of_characters_is_refused_and_not_unpickled(tmp_path, refused):
    write_tokens(tmp_path, [1, 2], [3, 4])

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "unpickled"),)

    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Trap()))
    problem = refused("data.tokenizer-mismatch", lambda: TokenFiles.at(tmp_path))
    assert "CUSTOM_FORMAT_TEXT=y" in problem.next and not (tmp_path / "unpickled").exists()


def test_token_files_keep_their_split(config, tmp_path, capsys):
    train, val = np.arange(2000) % 65, np.arange(300) % 61
    write_tokens(tmp_path / "texts", train, val)
    settings = config(custom_format="bin")
    prepare_dataset(settings, tmp_path)
    dataset = open_dataset(settings, tmp_path)
    assert dataset.train.window(0, 2000).tolist() == train.tolist()
    assert dataset.val.window(0, 300).tolist() == val.tolist()
    assert dataset.val.documents is None
    assert dataset.manifest["split"]["rule"] == "as given: train.bin and val.bin"
    assert "largest token id 64 of 257" in capsys.readouterr().err


@pytest.mark.parametrize("width", [1, 3, 10])
def test_documents_of_tokens_do_not_depend_on_chunks(width):
    tokens = np.array([9, 1, 2, 9, 9, 3, 4, 5, 9, 6], dtype=np.uint16)
    chunks = (tokens[start : start + width] for start in range(0, len(tokens), width))
    assert [d.tolist() for d in token_documents(chunks, 9)] == [[1, 2], [3, 4, 5], [6]]
