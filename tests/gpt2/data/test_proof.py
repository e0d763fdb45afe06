"""Documents in both splits: duplicates are an error, near duplicates are listed."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpt2.data.dataset import dataset_folder, open_dataset
from gpt2.data.options import DataOptions
from gpt2.data.prepare import prepare_dataset
from gpt2.data.split import DocumentSplitter, folded_digest
from lib.errors import DataError

Settings = Callable[..., DataOptions]


@pytest.fixture
def apart(config: Settings, texts: dict[str, str], tmp_path: Path) -> Settings:
    """Twelve training documents and two held-out documents."""
    held_out = tmp_path / "held-out"
    held_out.mkdir()
    (held_out / "00.txt").write_text("Held out, and nothing like the others.")
    (held_out / "last.txt").write_text("The last one.")
    return lambda **changes: config(**({"custom_val_path": "held-out"} | changes))


def split_of(config: DataOptions, build_dir: Path) -> dict:
    """Return the split's entry in the manifest."""
    found: dict = json.loads((prepare_dataset(config, build_dir) / "dataset.json").read_text())[
        "split"
    ]
    return found


def test_a_separate_folder_is_held_out(
    apart: Settings, texts: dict[str, str], tmp_path: Path
) -> None:
    split = split_of(apart(), tmp_path)
    dataset = open_dataset(apart(), tmp_path)
    assert [d.id for d in dataset.train.documents] == sorted(texts)
    assert [d.id for d in dataset.val.documents] == ["00.txt", "last.txt"]
    assert split["rule"] == "as given: CUSTOM_PATH and CUSTOM_VAL_PATH"
    assert split["proof"]["documents"] == {"train": 12, "val": 2}
    assert split["proof"]["near_duplicates"]["count"] == 0
    sides = [source["split"] for source in dataset.manifest["sources"]]
    assert sides == ["train"] * 12 + ["val"] * 2
    # VAL_FRACTION has no effect.
    assert dataset_folder(apart(val_fraction=0.1), tmp_path) == dataset_folder(apart(), tmp_path)
    (tmp_path / "held-out" / "last.txt").write_text("Another end.")
    assert not dataset_folder(apart(), tmp_path).exists()


def test_an_exact_duplicate_is_an_error_with_both_names(
    apart: Settings, texts: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "held-out" / "copied.txt").write_text(texts["07.txt"])
    with pytest.raises(DataError) as caught:
        prepare_dataset(apart(), tmp_path)
    assert caught.value.codes == ["data.split-overlap", "data.split-overlap"]
    pair, total = caught.value.problems
    assert "07.txt" in pair.what and "copied.txt" in pair.what
    assert total.what.startswith("1 document(s)")
    assert caught.value.exit_code == 3
    assert [p.name for p in (tmp_path / "data").iterdir()] == [".lock"]


def test_lines_are_documents_too(config: Settings, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"line {i}"}) for i in range(9)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines[:7]))
    (tmp_path / "val.jsonl").write_text("\n".join([*lines[7:], lines[3]]))
    both = config(custom_format="jsonl", custom_path="train.jsonl", custom_val_path="val.jsonl")
    with pytest.raises(DataError) as caught:
        prepare_dataset(both, tmp_path)
    assert set(caught.value.codes) == {"data.split-overlap"}
    assert "train.jsonl:4 " in str(caught.value) and "val.jsonl:3 " in str(caught.value)


def test_near_duplicates_are_listed(
    apart: Settings, texts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = texts["04.txt"].upper().replace(" ", "\n\n ").replace("É", "E\u0301")
    (tmp_path / "held-out" / "near.txt").write_text(changed)
    near = split_of(apart(), tmp_path)["proof"]["near_duplicates"]
    assert near["count"] == 1
    assert near["pairs"] == [{"train": "04.txt", "val": "near.txt"}]
    warning = capsys.readouterr().err
    assert "WARN    1 near-duplicate" in warning and "04.txt and near.txt" in warning
    assert folded_digest("a b") != folded_digest("ab")


def test_near_duplicates_may_be_in_different_splits(
    config: Settings, texts: dict[str, str], tmp_path: Path
) -> None:
    for name, text in texts.items():
        (tmp_path / "texts" / f"loud-{name}").write_text(text.upper())

    def held_out(text: str) -> bool:
        return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) / 2**64 < 0.3

    apart = sum(held_out(text) != held_out(text.upper()) for text in texts.values())
    proof = split_of(config(), tmp_path)["proof"]
    assert 0 < apart == proof["near_duplicates"]["count"] == len(proof["near_duplicates"]["pairs"])
    assert proof["overlap"] == 0


def test_token_files_are_compared_by_document(
    config: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Documents end with 256 here; the second of val.bin is the third of train.bin."""
    (tmp_path / "texts").mkdir()
    train = [1, 2, 256, 3, 256, 4, 5, 6, 256, 7]
    np.array(train, dtype="<u2").tofile(tmp_path / "texts/train.bin")
    np.array([1, 256, 4, 5, 6, 256], dtype="<u2").tofile(tmp_path / "texts/val.bin")
    with pytest.raises(DataError) as caught:
        prepare_dataset(config(custom_format="bin"), tmp_path)
    assert set(caught.value.codes) == {"data.split-overlap"}
    assert re.search(r"training .*document 2 .*held-out .*document 1 ", str(caught.value))
    np.array([1, 256, 256, 4, 5, 256], dtype="<u2").tofile(tmp_path / "texts/val.bin")
    proof = split_of(config(custom_format="bin"), tmp_path)["proof"]
    assert proof["documents"] == {"train": 4, "val": 2}
    assert proof["near_duplicates"] is None
    assert "WARN" in capsys.readouterr().err


def test_document_splitting_does_not_depend_on_chunks() -> None:
    tokens = np.array([9, 1, 2, 9, 9, 3, 4, 5, 9, 6], dtype=np.uint16)
    found = []
    for width in (1, 3, 10):
        digests: list[bytes] = []
        pieces = DocumentSplitter(9, digests.append)
        for start in range(0, len(tokens), width):
            pieces.add(tokens[start : start + width])
        pieces.end()
        found.append(digests)
    expected = [np.array(p, dtype="<u2").tobytes() for p in ([1, 2], [3, 4, 5], [6])]
    assert found == [[hashlib.sha256(piece).digest() for piece in expected]] * 3
