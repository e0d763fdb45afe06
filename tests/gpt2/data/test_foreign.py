"""Foreign files are read right or refused: encodings, line ends, and token files of other programs."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpt2.data.corpus import CustomCorpus, SourceFile, custom_corpus, decode
from gpt2.data.dataset import dataset_folder, open_dataset
from gpt2.data.options import DataOptions
from gpt2.data.prepare import prepare_dataset
from gpt2.data.tokenizer import ByteTokenizer
from lib.errors import DataError

Settings = Callable[..., DataOptions]


def normal(text: str) -> str:
    """Return a text as the documents describe it."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    return lines.lstrip("\ufeff")


@given(text=st.text())
@example(text="\ufeffsigned\r\nlines\r")
@example(text="a\ufeffb\u200b\u00ad\u202e")
def test_any_text_is_decoded_the_same_in_a_file_and_in_a_line(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("text")
    (folder / "lines.jsonl").write_text(json.dumps({"text": text}) + "\r\n")
    (line,) = custom_corpus(folder / "lines.jsonl", "jsonl", "text").documents()
    assert line.text == normal(text)
    if text.count("\0") * 10 <= len(text.encode()):
        (folder / "a.txt").write_bytes(text.encode())
        (file,) = custom_corpus(folder / "a.txt", "text").documents()
        assert file.text == normal(text)
        assert ByteTokenizer().decode(ByteTokenizer().encode(file.text)) == normal(text)


def test_a_signature_hides_no_equal_document(config: Settings, tmp_path: Path) -> None:
    for name, content in (("texts", b"one\ntwo\n"), ("held", b"\xef\xbb\xbfone\r\ntwo\r\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_bytes(content)
    with pytest.raises(DataError) as caught:
        prepare_dataset(config(custom_val_path="held"), tmp_path)
    assert set(caught.value.codes) == {"data.split-overlap"}


def test_invisible_characters_hide_no_near_duplicate(config: Settings, tmp_path: Path) -> None:
    for name, text in (("texts", "a hyphenated word"), ("held", "a hy\u00adphen\u200bated word")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(text, encoding="utf-8")
    prepare_dataset(config(custom_val_path="held"), tmp_path)
    opened = open_dataset(config(custom_val_path="held"), tmp_path)
    proof = opened.manifest["split"]["proof"]
    assert proof["near_duplicates"]["pairs"] == [{"train": "a.txt", "val": "a.txt"}]
    assert proof["near_duplicates"]["rule"].endswith("none invisible")
    text = ByteTokenizer().decode(opened.val.window(0, opened.val.n_tokens))
    assert text == "a hy\u00adphen\u200bated word"


@pytest.mark.parametrize(
    ("encoding", "suggested"),
    [
        ("utf-16", "UTF-16"),
        ("utf-32", "UTF-32"),
        ("utf-16-le", "UTF-16LE"),
        ("utf-16-be", "UTF-16BE"),
        ("latin1", "latin1"),
    ],
)
def test_another_encoding_is_refused_with_the_command_that_converts_it(
    encoding: str, suggested: str, tmp_path: Path
) -> None:
    path = tmp_path / "in Zürich.txt"
    path.write_text("naïve café\n", encoding=encoding)
    with pytest.raises(DataError) as caught:
        list(custom_corpus(path, "text").documents())
    (problem,) = caught.value.problems
    assert problem.code == "data.invalid-format" and f"iconv -f {suggested} " in problem.next
    command = problem.next.split("example: ")[1].split("; then")[0]
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert decode((tmp_path / "converted").read_bytes(), path) == "naïve café\n"


@pytest.mark.parametrize(
    ("plain", "altered"),
    [
        (b"a\n", b"a\r\n"),
        (b"a\n", b"\xef\xbb\xbfa\n"),
    ],
)
def test_only_a_source_that_is_read_otherwise_than_before_gets_another_name(
    plain: bytes, altered: bytes, tmp_path: Path
) -> None:
    for content, expected in ((plain, False), (altered, True)):
        (tmp_path / "a.txt").write_bytes(content)
        assert custom_corpus(tmp_path / "a.txt", "text").is_altered is expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"text": "a\\nb"}', False),
        ('{"text": "C:\\\\runs \\\\ufeff"}', False),
        ('\ufeff{"text": "a"}\r', False),
        ('{"text": "a\\r\\nb"}', True),
        ('{"text": "\\\\\\r"}', True),
        ('{"text": "\\uFEFFa"}', True),
        ('{"text": "\ufeffa"}', True),
    ],
)
def test_lines_that_are_read_otherwise_than_before(
    line: str, expected: bool, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n", encoding="utf-8", newline="")
    assert custom_corpus(tmp_path / "a.jsonl", "jsonl", "text").is_altered is expected


def test_a_file_that_grows_while_it_is_read(
    config: Settings, texts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = tmp_path / "texts" / "11.txt"
    read = SourceFile.pieces

    def growing(self: SourceFile) -> object:
        if self.path == grown:
            with open(grown, "a") as stream:
                stream.write("one more line\n")
        return read(self)

    dataset_folder(config(), tmp_path)
    monkeypatch.setattr(SourceFile, "pieces", growing)
    with pytest.raises(DataError) as caught:
        prepare_dataset(config(), tmp_path)
    assert caught.value.codes == ["data.changed"]
    assert caught.value.problems[0].where == str(grown)
    assert [p.name for p in (tmp_path / "data").glob("*custom*")] == []


def test_an_unreadable_folder_below_and_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    os.mkfifo(tmp_path / "texts" / "pipe.txt")
    with pytest.raises(DataError) as caught:
        custom_corpus(tmp_path / "texts", "text").identity()
    assert caught.value.codes == ["data.unreadable"]


def test_a_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"z\xfcrich.txt")).write_text("text")
    with pytest.raises(DataError) as caught:
        custom_corpus(tmp_path, "text")
    assert caught.value.codes == ["data.invalid-format"]
    assert "\\udcfc" in str(caught.value)


@given(name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), max_size=9))
def test_any_file_name_is_the_name_of_a_document(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("named")
    (folder / f"a{name}.txt").write_text("text")
    (document,) = custom_corpus(folder, "text").documents()
    assert document.id == f"a{name}.txt"


def tokens(folder: Path, dtype: str, low: int = 0) -> CustomCorpus:
    """Write token files of English text with ids of ``dtype``, and return them."""
    folder.mkdir(exist_ok=True)
    ids = [byte + low for byte in b"To be, or not to be, that is the question.\n" * 40]
    for name in ("train.bin", "val.bin"):
        np.array(ids, dtype=dtype).tofile(folder / name)
    return custom_corpus(folder, "bin")


@pytest.mark.parametrize("dtype", ["<u4", ">u4", "<i8", ">i8"])
def test_wider_token_ids_are_refused_with_the_command_that_converts_them(
    dtype: str, tmp_path: Path
) -> None:
    folder = tmp_path / "the tokens"
    with pytest.raises(DataError) as caught:
        tokens(folder, dtype)
    (problem,) = caught.value.problems
    assert problem.code == "data.invalid-format" and problem.where == str(folder / "train.bin")
    assert f"{8 * np.dtype(dtype).itemsize} bits" in problem.what
    command = problem.next.split("example: ")[1].replace("python3", sys.executable, 1)
    subprocess.run(command, shell=True, check=True)
    (chunk,) = custom_corpus(tmp_path / "the tokens-16bit", "bin").tokens("train", 257)
    assert bytes(chunk.tolist()).startswith(b"To be, or not")


def test_ids_above_16_bits_are_refused_too(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        tokens(tmp_path / "wide", "<u4", low=120_000)
    assert caught.value.codes == ["data.invalid-format"]


def test_headers_of_other_programs(tmp_path: Path) -> None:
    tokens(tmp_path, "<u2")
    plain = (tmp_path / "val.bin").read_bytes()
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 1720
    (tmp_path / "val.bin").write_bytes(header.tobytes() + plain)
    with pytest.raises(DataError) as caught:
        custom_corpus(tmp_path, "bin")
    assert "llm.c" in caught.value.problems[0].what and "+1025" in caught.value.problems[0].next
    with open(tmp_path / "val.bin", "wb") as stream:
        np.save(stream, np.frombuffer(plain, "<u2"))
    with pytest.raises(DataError) as caught:
        custom_corpus(tmp_path, "bin")
    assert caught.value.codes == ["data.invalid-format"]
    assert "NumPy" in caught.value.problems[0].what


def test_a_vocabulary_of_characters_is_refused_and_not_unpickled(tmp_path: Path) -> None:
    tokens(tmp_path, "<u2")

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "unpickled"),)

    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(DataError) as caught:
        custom_corpus(tmp_path, "bin")
    assert caught.value.codes == ["data.tokenizer-mismatch"]
    assert "CUSTOM_FORMAT_TEXT=y" in caught.value.problems[0].next
    assert not (tmp_path / "unpickled").exists()


def test_ids_of_a_small_vocabulary_are_noted(
    config: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    for name in ("train.bin", "val.bin"):
        (np.arange(2000) % (61 if name == "val.bin" else 65)).astype("<u2").tofile(
            tmp_path / "texts" / name
        )
    prepare_dataset(config(custom_format="bin"), tmp_path)
    assert "largest token id 64 of 257" in capsys.readouterr().err


@pytest.mark.parametrize("val", [[], [5]])
def test_token_files_without_a_predicted_token(
    val: list[int], config: Settings, tmp_path: Path
) -> None:
    tokens(tmp_path / "texts", "<u2")
    np.array(val, "<u2").tofile(tmp_path / "texts" / "val.bin")
    with pytest.raises(DataError) as caught:
        prepare_dataset(config(custom_format="bin"), tmp_path)
    assert caught.value.codes == ["data.empty-split"] and "held-out" in str(caught.value)
    assert [p.name for p in (tmp_path / "data").iterdir()] == [".lock"]


def test_held_out_files_without_text(
    config: Settings, texts: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "held.txt").write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(DataError) as caught:
        prepare_dataset(config(custom_val_path="held.txt"), tmp_path)
    assert caught.value.codes == ["data.empty-split"]
