"""Custom data: each format read as it is, and bad input named with its place."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpt2.data.custom import find
from gpt2.data.options import DataConfig
from gpt2.data.prepare import prepare
from gpt2.data.store import open_dataset
from lib.errors import DataError


def test_text_files_are_read_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes("zwei\r\n".encode())
    (tmp_path / "a.txt").write_bytes("één\n".encode())
    (tmp_path / "notes.md").write_text("not a document")
    found = [(d.id, d.text) for d in find(tmp_path, "text", "").documents(tmp_path)]
    assert found == [("a.txt", "één\n"), ("b.txt", "zwei\r\n")]


def test_jsonl_lines(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"body": "one", "n": 1}\n\n{"body": "tw\\u00f6"}', encoding="utf-8")
    found = [(d.id, d.text) for d in find(path, "jsonl", "body").documents(tmp_path)]
    assert found == [("d.jsonl:1", "one"), ("d.jsonl:3", "twö")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{not json}", "not JSON"),
        (b'{"text": "\xff"}', "not JSON in UTF-8"),
        (b'["text"]', "expected a JSON object, found list"),
        (b'{"body": "x"}', "expected text in the field 'text', there is none"),
        (b'{"text": 3}', "expected text in the field 'text', found int"),
        (b'{"text": "\\ud800"}', "the field 'text' holds half of a surrogate pair"),
    ],
)
def test_bad_jsonl_line(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(DataError) as caught:
        list(find(path, "jsonl", "text").documents(tmp_path))
    assert str(caught.value).startswith(f"{path}:2: {message}")


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    path.write_bytes(b"ab\xff")
    with pytest.raises(DataError, match=f"{path}: not UTF-8 at byte 2"):
        list(find(path, "text", "").documents(tmp_path))


@pytest.mark.parametrize("data_format", ["text", "jsonl", "bin"])
def test_nothing_there(data_format: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        find(tmp_path / "none", data_format, "text")
    with pytest.raises(DataError, match=r"no (\*\.txt|\*\.jsonl|train\.bin and no val\.bin) in it"):
        find(tmp_path, data_format, "text")


def bin_folder(folder: Path, train: np.ndarray, val: np.ndarray) -> None:
    """Write nanoGPT's two files."""
    folder.mkdir(exist_ok=True)
    train.astype("<u2").tofile(folder / "train.bin")
    val.astype("<u2").tofile(folder / "val.bin")


def test_bin_keeps_its_split(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    train, val = np.arange(1000) % 257, np.arange(300) % 7
    bin_folder(tmp_path / "texts", train, val)
    settings = config(custom_format="bin")
    prepare(settings, tmp_path)
    dataset = open_dataset(settings, tmp_path)
    assert dataset.train.window(0, 1000).tolist() == train.tolist()
    assert dataset.val.window(0, 300).tolist() == val.tolist()
    assert dataset.val.documents is None
    assert dataset.manifest["split"]["rule"] == "as given: train.bin and val.bin"


def test_bin_of_another_tokenizer(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    bin_folder(tmp_path / "texts", np.array([1, 256, 257]), np.array([1]))
    with pytest.raises(DataError, match="train.bin: token 2 is 257, the tokenizer has 257"):
        prepare(config(custom_format="bin"), tmp_path)
    (tmp_path / "texts" / "train.bin").write_bytes(b"\1\0\2")
    with pytest.raises(DataError, match="train.bin: an odd number of bytes"):
        prepare(config(custom_format="bin"), tmp_path)
    assert not list((tmp_path / "data").glob("*custom*"))
