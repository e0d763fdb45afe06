"""Custom data sets: every format is read unchanged; errors name file and line."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpt2.data.corpus import custom_corpus
from gpt2.data.dataset import open_dataset
from gpt2.data.options import DataOptions
from gpt2.data.prepare import prepare_dataset
from lib.errors import DataError


def read(path: Path, data_format: str = "text", field: str = "text") -> list[tuple[str, str]]:
    """Return name and text of each document."""
    return [(d.id, d.text) for d in custom_corpus(path, data_format, field).documents()]


def test_text_files_of_a_folder_and_of_folders_below(tmp_path: Path) -> None:
    (tmp_path / "b.TXT").write_bytes(b"zwei\r\n")
    (tmp_path / "a.txt").write_bytes("één\n".encode())
    (tmp_path / "below" / ".hidden").mkdir(parents=True)
    (tmp_path / "below" / "a.txt").write_text("three")
    (tmp_path / "below" / ".hidden" / "copy.txt").write_text("not a document")
    assert read(tmp_path) == [("a.txt", "één\n"), ("b.TXT", "zwei\n"), ("below/a.txt", "three")]


def test_files_that_are_left_out_are_named(
    config: Callable[..., DataOptions],
    texts: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "texts" / "below").mkdir()
    for name in ("notes.md", "below/more.md", "LICENSE"):
        (tmp_path / "texts" / name).write_text("not a document")
    (tmp_path / "texts" / "linked").symlink_to(tmp_path)
    prepare_dataset(config(), tmp_path)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "not read" in line]
    assert line.startswith("WARN") and "2 *.md, 1 linked folder linked, 1 LICENSE" in line


def test_jsonl_lines(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"body": "one", "n": 1}\n\n{"body": "tw\\u00f6"}', encoding="utf-8")
    assert read(path, "jsonl", "body") == [("d.jsonl:1", "one"), ("d.jsonl:3", "twö")]


@pytest.mark.parametrize(
    ("line", "detail"),
    [
        (b"{not json}", "JSON"),
        (b'{"text": "\xff"}', "UTF-8"),
        (b'["text"]', "list"),
        (b'{"body": "x"}', "'text'"),
        (b'{"text": 3}', "int"),
        (b'{"text": "\\ud800"}', "surrogate"),
    ],
)
def test_bad_jsonl_line(line: bytes, detail: str, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(DataError) as caught:
        read(path, "jsonl")
    assert caught.value.codes == ["data.invalid-format"]
    (problem,) = caught.value.problems
    assert problem.where == f"{path}:2" and detail in problem.what


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    path.write_bytes(b"ab\xff")
    with pytest.raises(DataError) as caught:
        read(path)
    assert caught.value.codes == ["data.invalid-format"]
    (problem,) = caught.value.problems
    assert problem.where == str(path) and "byte 2" in problem.what


@pytest.mark.parametrize("data_format", ["text", "jsonl", "bin"])
def test_missing_files(data_format: str, tmp_path: Path) -> None:
    pattern = {"text": "*.txt", "jsonl": "*.jsonl", "bin": "train.bin and val.bin"}
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(DataError) as caught:
            custom_corpus(path, data_format, "text")
        assert caught.value.codes == ["data.missing"]
        assert caught.value.problems[0].where == str(path)
    assert pattern[data_format] in str(caught.value)


def test_files_of_another_suffix_are_named(tmp_path: Path) -> None:
    (tmp_path / "chapter.md").write_text("text")
    with pytest.raises(DataError) as caught:
        custom_corpus(tmp_path, "text", "")
    (problem,) = caught.value.problems
    assert problem.code == "data.missing" and "*.md" in problem.what and "*.txt" in problem.next


def bin_folder(folder: Path, train: np.ndarray, val: np.ndarray) -> None:
    """Write nanoGPT's train.bin and val.bin."""
    folder.mkdir(exist_ok=True)
    train.astype("<u2").tofile(folder / "train.bin")
    val.astype("<u2").tofile(folder / "val.bin")


def test_bin_keeps_its_split(config: Callable[..., DataOptions], tmp_path: Path) -> None:
    train, val = np.arange(1000) % 257, np.arange(300) % 7
    bin_folder(tmp_path / "texts", train, val)
    settings = config(custom_format="bin")
    prepare_dataset(settings, tmp_path)
    dataset = open_dataset(settings, tmp_path)
    assert dataset.train.window(0, 1000).tolist() == train.tolist()
    assert dataset.val.window(0, 300).tolist() == val.tolist()
    assert dataset.val.documents is None
    assert dataset.manifest["split"]["rule"] == "as given: train.bin and val.bin"


def test_bin_of_another_tokenizer(config: Callable[..., DataOptions], tmp_path: Path) -> None:
    bin_folder(tmp_path / "texts", np.array([1, 256, 257]), np.array([1]))
    with pytest.raises(DataError) as caught:
        prepare_dataset(config(custom_format="bin"), tmp_path)
    assert caught.value.codes == ["data.tokenizer-mismatch"]
    assert "token 2 " in str(caught.value) and "got 257" in str(caught.value)
    (tmp_path / "texts" / "train.bin").write_bytes(b"\1\0\2")
    with pytest.raises(DataError) as caught:
        prepare_dataset(config(custom_format="bin"), tmp_path)
    assert caught.value.codes == ["data.invalid-format"]
    assert caught.value.problems[0].where.endswith("train.bin")
    assert not list((tmp_path / "data").glob("*custom*"))
