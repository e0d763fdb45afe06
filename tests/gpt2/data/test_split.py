"""Which side a text is on: by its hash, or by pieces of few documents; duplicates across the sides."""

import hashlib
import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpt2.data.dataset import dataset_folder, open_dataset
from gpt2.data.prepare import prepare_dataset
from gpt2.data.split import Document, folded_digest, pieces
from gpt2.data.tokenizer import ByteTokenizer


def split_of(config, build_dir):
    """Return the split's entry in the manifest."""
    prepare_dataset(config, build_dir)
    return open_dataset(config, build_dir).manifest["split"]


def sides(config, build_dir):
    """Prepare, and return document id → split."""
    prepare_dataset(config, build_dir)
    opened = open_dataset(config, build_dir)
    return {d.id: split.name for split in (opened.train, opened.val) for d in split.documents}


def share(text):
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) / 2**64


def test_the_hash_of_the_text_decides_and_disjointness_is_recorded(config, texts, tmp_path):
    before = sides(config(), tmp_path)
    expected = {name: "val" if share(text) < 0.3 else "train" for name, text in texts.items()}
    assert before == expected and set(before.values()) == {"train", "val"}
    # A new document moves no other, and the same text under another name is on the same side.
    (tmp_path / "texts" / "000.txt").write_text("A new document.")
    (tmp_path / "texts" / "copy.txt").write_text(texts["03.txt"], encoding="utf-8")
    found = sides(config(), tmp_path)
    assert {name: found[name] for name in before} == before and found["copy.txt"] == found["03.txt"]
    manifest = open_dataset(config(), tmp_path).manifest
    counts, proof, lists = manifest["splits"], manifest["split"]["proof"], {}
    for name in ("train", "val"):
        of_side = [(tmp_path / "texts" / d).read_bytes() for d, s in found.items() if s == name]
        digests = {hashlib.sha256(text).hexdigest() for text in of_side}
        lists[name] = hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()
        assert counts[name]["documents_sha256"] == lists[name]
        assert proof["documents"][name] == counts[name]["documents"] == len(of_side)
        assert counts[name]["distinct_documents"] == len(digests)
    assert (proof["unit"], proof["overlap"]) == ("document", 0)
    sides_of_it = f"train:{lists['train']}\nval:{lists['val']}".encode()
    assert proof["digest"] == hashlib.sha256(sides_of_it).hexdigest()


def write(folder, count):
    """Write text files of some lines and return their texts."""
    folder.mkdir()
    texts = [f"Line of document {i} — naïve.\n" * (20 + i) for i in range(count)]
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return texts


@pytest.mark.parametrize("count", [1, 3, 9])
def test_few_files_are_cut_and_each_is_on_both_sides(count, config, tmp_path, capsys):
    texts = write(tmp_path / "texts", count)
    settings = config(val_fraction=0.1)
    split = split_of(settings, tmp_path)
    opened = open_dataset(settings, tmp_path)
    for number, text in enumerate(texts):
        parts = []
        for side, piece in ((opened.train, 1), (opened.val, 2)):
            span = side.documents[number]
            assert span.id == f"{number}.txt#{piece}"
            parts.append(ByteTokenizer().decode(side.window(span.offset, span.length)))
        assert "".join(parts) == text and parts[0].endswith("\n")
        assert 0.05 <= len(parts[1]) / len(text) <= 0.15
    assert split["proof"]["unit"] == "piece"
    assert split["proof"]["documents"] == {"train": count, "val": count}
    assert "last val_fraction" in split["rule"]
    assert f"({count} and {count} pieces)" in capsys.readouterr().err


def test_documents_that_leave_a_side_empty_are_cut(config, tmp_path):
    """One document in twenty is held out, and none of these eleven."""
    write(tmp_path / "texts", 12)
    (tmp_path / "texts" / "5.txt").unlink()
    for fraction, unit in ((0.05, "piece"), (0.3, "document")):
        assert split_of(config(val_fraction=fraction), tmp_path)["proof"]["unit"] == unit


def test_a_long_text_is_held_out_in_several_places(config, tmp_path):
    (tmp_path / "texts").write_text("".join(f"line {i}\n" for i in range(60_000)))
    settings = config(val_fraction=0.1)
    prepare_dataset(settings, tmp_path)
    opened = open_dataset(settings, tmp_path)
    assert len(opened.train.documents) == len(opened.val.documents) == 3
    whole = opened.val.n_tokens + opened.train.n_tokens
    assert opened.val.n_tokens / whole == pytest.approx(0.1, abs=0.001)


@settings(max_examples=50)
@given(
    text=st.text(st.sampled_from(" \n") | st.characters(exclude_categories=["Cs"]), max_size=400),
    fraction=st.floats(0.01, 0.5),
)
@example(text="some words in a line\nor two", fraction=0.5)
def test_the_pieces_of_any_text_are_the_text(text, fraction):
    parts = list(pieces(Document("d", text), fraction))
    assert "".join(piece.text for _, piece in parts) == text
    assert all(piece.text for _, piece in parts)
    assert [side for side, _ in parts] == ["train", "val"][: len(parts)]
    if len(text) > 1:
        assert len(parts) == 2


@pytest.fixture
def apart(config, texts, tmp_path):
    """Twelve training documents and two held-out documents."""
    held_out = tmp_path / "held-out"
    held_out.mkdir()
    (held_out / "00.txt").write_text("Held out, and nothing like the others.")
    (held_out / "last.txt").write_text("The last one.")
    return lambda **changes: config(**({"custom_val_path": "held-out"} | changes))


def test_a_separate_folder_is_held_out(apart, texts, tmp_path):
    found = sides(apart(), tmp_path)
    opened = open_dataset(apart(), tmp_path)
    assert [d.id for d in opened.train.documents] == sorted(texts)
    assert [d.id for d in opened.val.documents] == ["00.txt", "last.txt"] and len(found) == 13
    split = opened.manifest["split"]
    assert split["rule"] == "as given: CUSTOM_PATH and CUSTOM_VAL_PATH"
    assert split["proof"]["documents"] == {"train": 12, "val": 2}
    assert split["proof"]["near_duplicates"]["count"] == 0
    sources = [source["split"] for source in opened.manifest["sources"]]
    assert sources == ["train"] * 12 + ["val"] * 2
    # VAL_FRACTION has no effect.
    assert dataset_folder(apart(val_fraction=0.1), tmp_path) == dataset_folder(apart(), tmp_path)
    (tmp_path / "held-out" / "last.txt").write_text("Another end.")
    assert not dataset_folder(apart(), tmp_path).exists()


def test_near_duplicates_are_listed(apart, texts, tmp_path, capsys):
    changed = texts["04.txt"].upper().replace(" ", "\n\n ").replace("É", "E\u0301")
    hidden = texts["05.txt"].replace("Document", "Docu\u00adm\u200bent")
    for name, text in (("near.txt", changed), ("zhidden.txt", hidden)):
        (tmp_path / "held-out" / name).write_text(text, encoding="utf-8")
    near = split_of(apart(), tmp_path)["proof"]["near_duplicates"]
    assert near["count"] == 2 and near["rule"].endswith("none invisible")
    pairs = [{"train": "04.txt", "val": "near.txt"}, {"train": "05.txt", "val": "zhidden.txt"}]
    assert near["pairs"] == pairs
    warning = capsys.readouterr().err
    assert "WARN    2 near-duplicate" in warning and "04.txt and near.txt" in warning
    assert folded_digest("a b") != folded_digest("ab")
    # Invisible characters are trained.
    held_out = open_dataset(apart(), tmp_path).val
    span = held_out.documents[-1]
    assert ByteTokenizer().decode(held_out.window(span.offset, span.length)) == hidden


def test_token_files_are_compared_by_document(config, tmp_path, capsys, refused):
    """Documents end with 256 here; the second of val.bin is the third of train.bin."""
    (tmp_path / "texts").mkdir()
    train = [1, 2, 256, 3, 256, 4, 5, 6, 256, 7]
    np.array(train, dtype="<u2").tofile(tmp_path / "texts/train.bin")
    np.array([1, 256, 4, 5, 6, 256], dtype="<u2").tofile(tmp_path / "texts/val.bin")
    problem = refused("data.split-overlap", prepare_dataset, config(custom_format="bin"), tmp_path)
    assert re.search(r"training .*document 2 .*held-out .*document 1$", problem.what)
    np.array([1, 256, 256, 4, 5, 256], dtype="<u2").tofile(tmp_path / "texts/val.bin")
    proof = split_of(config(custom_format="bin"), tmp_path)["proof"]
    assert proof["documents"] == {"train": 4, "val": 2}
    assert proof["near_duplicates"] is None
    assert "WARN" in capsys.readouterr().err
