"""Few documents: they are split by pieces, and the proof and the log say so."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpt2.data import dataset
from gpt2.data.dataset import dataset_folder, open_dataset
from gpt2.data.options import DataOptions
from gpt2.data.packages import Document
from gpt2.data.prepare import prepare_dataset
from gpt2.data.split import pieces
from gpt2.data.tokenizer import ByteTokenizer
from lib.errors import DataError

Settings = Callable[..., DataOptions]


def write(folder: Path, count: int) -> list[str]:
    """Write text files of some lines and return their texts."""
    folder.mkdir()
    texts = [f"Line of document {i} — naïve.\n" * (20 + i) for i in range(count)]
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return texts


@pytest.mark.parametrize("count", [1, 3, 9])
def test_few_files_are_cut_and_each_is_on_both_sides(
    count: int, config: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write(tmp_path / "texts", count)
    settings = config(val_fraction=0.1)
    prepare_dataset(settings, tmp_path)
    opened = open_dataset(settings, tmp_path)
    sides = {split.name: split for split in (opened.train, opened.val)}
    names = {name: [d.id for d in split.documents or ()] for name, split in sides.items()}
    assert names["train"] == [f"{i}.txt#1" for i in range(count)]
    assert names["val"] == [f"{i}.txt#2" for i in range(count)]
    words = ByteTokenizer()
    for number, text in enumerate(texts):
        spans = [sides[name].documents[number] for name in ("train", "val")]
        parts = [sides[n].window(s.offset, s.length) for n, s in zip(sides, spans, strict=True)]
        train, val = (words.decode(part) for part in parts)
        assert train + val == text and train.endswith("\n")
        assert 0.05 <= len(val) / len(text) <= 0.15
    proof = opened.manifest["split"]["proof"]
    assert proof["unit"] == "piece" and proof["documents"] == {"train": count, "val": count}
    assert "last val_fraction" in opened.manifest["split"]["rule"]
    assert f"({count} and {count} pieces)" in capsys.readouterr().err


def test_documents_that_leave_a_side_empty_are_cut(config: Settings, tmp_path: Path) -> None:
    """One document in twenty is held out, and none of these eleven."""
    write(tmp_path / "texts", 12)
    (tmp_path / "texts" / "5.txt").unlink()
    few = config(val_fraction=0.05)
    prepare_dataset(few, tmp_path)
    assert open_dataset(few, tmp_path).manifest["split"]["proof"]["unit"] == "piece"
    many = config(val_fraction=0.3)
    prepare_dataset(many, tmp_path)
    assert open_dataset(many, tmp_path).manifest["split"]["proof"]["unit"] == "document"


def test_a_long_text_is_held_out_in_several_places(config: Settings, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("".join(f"line {i}\n" for i in range(60_000)))
    prepare_dataset(config(val_fraction=0.1), tmp_path)
    opened = open_dataset(config(val_fraction=0.1), tmp_path)
    assert len(opened.train.documents) == len(opened.val.documents) == 3
    share = opened.val.n_tokens / (opened.val.n_tokens + opened.train.n_tokens)
    assert share == pytest.approx(0.1, abs=0.001)


def test_two_equal_files_are_cut_equally(config: Settings, tmp_path: Path) -> None:
    texts = write(tmp_path / "texts", 1)
    (tmp_path / "texts" / "copy.txt").write_text(texts[0], encoding="utf-8")
    prepare_dataset(config(), tmp_path)
    proof = open_dataset(config(), tmp_path).manifest["split"]["proof"]
    assert proof["documents"] == {"train": 2, "val": 2} and proof["overlap"] == 0


def test_the_folder_is_another_one_than_of_whole_documents(
    config: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "texts", 9)
    by_pieces = dataset_folder(config(), tmp_path)
    monkeypatch.setattr(dataset, "is_by_pieces", lambda *given: False)
    assert dataset_folder(config(), tmp_path) != by_pieces


@given(
    text=st.text(st.sampled_from(" \n") | st.characters(exclude_categories=["Cs"]), max_size=400),
    fraction=st.floats(0.01, 0.5),
)
@example(text="some words in a line\nor two", fraction=0.5)
def test_the_pieces_of_any_text_are_the_text(text: str, fraction: float) -> None:
    parts = list(pieces(Document("d", text), fraction))
    assert "".join(piece.text for _, piece in parts) == text
    assert all(piece.text for _, piece in parts)
    assert [side for side, _ in parts] == ["train", "val"][: len(parts)]
    if len(text) > 1:
        assert len(parts) == 2


def test_no_text_at_all_is_refused_with_a_remedy(config: Settings, tmp_path: Path) -> None:
    write(tmp_path / "texts", 0)
    for name in ("a.txt", "b.txt"):
        (tmp_path / "texts" / name).write_text("")
    with pytest.raises(DataError) as caught:
        prepare_dataset(config(), tmp_path)
    assert caught.value.codes == ["data.empty-split"]
    assert "CUSTOM_VAL_PATH" in caught.value.problems[0].next
