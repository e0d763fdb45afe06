"""Data sets of the hub: streaming from the hub and from local copies, and their errors."""

import importlib.util
import shutil
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpt2.data import hub
from gpt2.data import prepare as prepare_module
from gpt2.data.dataset import dataset_folder, open_dataset
from gpt2.data.prepare import prepare_dataset

HUB = {"dataset_path": "", "dataset_subset": "sample-10BT", "dataset_revision": "main"}


@pytest.mark.slow
def test_every_page_is_complete_and_the_budget_ends_with_one(streamed, pages, tmp_path, capsys):
    prepare_dataset(streamed(), tmp_path)
    assert "DATASET_TOKENS" in capsys.readouterr().err
    whole = open_dataset(streamed(), tmp_path)
    texts, order, side = dict(pages), [page for page, _ in pages], {}
    for split in (whole.train, whole.val):
        ids = [d.id for d in split.documents]
        assert ids == sorted(ids, key=order.index)
        side |= dict.fromkeys(ids, split.name)
        for d in split.documents:
            assert split.window(d.offset, d.length).tolist() == [*texts[d.id].encode(), 256]
    # All, and the duplicate page on the side of the first.
    assert side.keys() == texts.keys() and side[order[8]] == side[order[71]]
    (source,) = whole.manifest["sources"]
    names = [f"{name}.parquet" for name in ("000_00000", "000_00001", "CC/000_00000")]
    assert [f["name"] for f in source["files"]] == names
    assert source["licence"].startswith("ODC-By")
    # One token into the twentieth document.
    spans = whole.train.documents
    budget = spans[19].offset + 1
    prepare_dataset(streamed(dataset_tokens=budget), tmp_path)
    part = open_dataset(streamed(dataset_tokens=budget), tmp_path)
    assert part.train.documents == spans[:20]
    assert part.train.n_tokens == spans[19].offset + spans[19].length
    # Held-out documents come from the same pages.
    last = order.index(spans[19].id)
    assert part.val.documents == [d for d in whole.val.documents if order.index(d.id) < last]


def stop_at(monkeypatch, number):
    """Raise KeyboardInterrupt once, at document ``number``, shortly after a checkpoint."""
    monkeypatch.setattr(prepare_module, "CHECKPOINT_TOKENS", 100)
    original = hub.DocumentStream._document

    def stops(self, row):
        if self._number == number:
            monkeypatch.setattr(hub.DocumentStream, "_document", original)
            raise KeyboardInterrupt
        return original(self, row)

    monkeypatch.setattr(hub.DocumentStream, "_document", stops)


def test_openwebtext_documents_are_numbered(streamed, tmp_path, monkeypatch):
    (tmp_path / "pages").mkdir()
    texts = [f"Text {i} of the web. " * 3 for i in range(20)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "pages" / "train-00000.parquet")
    settings = streamed(dataset="openwebtext")
    stop_at(monkeypatch, 12)
    with pytest.raises(KeyboardInterrupt):
        prepare_dataset(settings, tmp_path)
    prepare_dataset(settings, tmp_path)
    dataset = open_dataset(settings, tmp_path)
    found = {d.id: s for s in (dataset.train, dataset.val) for d in s.documents}
    assert sorted(found, key=int) == [str(i) for i in range(20)]
    d = dataset.train.documents[0]
    assert dataset.train.window(d.offset, d.length - 1).tolist() == [*texts[int(d.id)].encode()]


def test_files_determine_the_folder_name(streamed, pages, tmp_path):
    folder = dataset_folder(streamed(), tmp_path)
    shutil.copytree(tmp_path / "pages", tmp_path / "copy")
    assert dataset_folder(streamed(dataset_path="copy"), tmp_path) == folder
    # Another footer of the same size.
    path = tmp_path / "copy" / "000_00000.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:-20] + bytes([content[-20] ^ 1]) + content[-19:])
    names = {dataset_folder(streamed(dataset_path=p), tmp_path).name for p in ("pages", "copy")}
    names.add(dataset_folder(streamed(dataset_tokens=5), tmp_path).name)
    assert len(names) == 3


def fake_hub(monkeypatch, folder, commit):
    """Replace the repository by ``folder`` at ``commit``; return the recorded calls."""
    import datasets

    calls = []
    load = datasets.load_dataset

    def load_dataset(place, **given):
        calls.append({"place": place, **given})
        return load(str(folder), split=given["split"], streaming=given["streaming"])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    stand_for(monkeypatch, commit)
    return calls


def stand_for(monkeypatch, commit):
    """Make every revision of the repository resolve to ``commit``."""
    found = SimpleNamespace(hash=commit)
    monkeypatch.setattr("datasets.load_dataset_builder", lambda *place, **given: found)


def test_the_hubs_commit_is_recorded_and_used_on_resume(streamed, pages, tmp_path, monkeypatch):
    settings = streamed(**HUB)
    calls = fake_hub(monkeypatch, tmp_path / "pages", "a" * 40)
    stop_at(monkeypatch, 50)
    with pytest.raises(KeyboardInterrupt):
        prepare_dataset(settings, tmp_path)
    # The branch now points to another commit.
    stand_for(monkeypatch, "b" * 40)
    prepare_dataset(settings, tmp_path)
    (source,) = open_dataset(settings, tmp_path).manifest["sources"]
    recorded = (source["subset"], source["revision"], source["commit"])
    assert recorded == ("sample-10BT", "main", "a" * 40)
    asked = ("HuggingFaceFW/fineweb-edu", "sample-10BT", "a" * 40)
    assert [(c["place"], c["name"], c["revision"]) for c in calls] == [asked] * 2


def test_an_error_lists_all_remedies_and_no_secret(streamed, tmp_path, monkeypatch, refused):
    hub_settings = streamed(**HUB)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    problem = refused("data.unreadable", prepare_dataset, hub_settings, tmp_path)
    assert problem.where == "HuggingFaceFW/fineweb-edu"
    for way in ("make data", "DATASET_PATH", "DATASET_STAND_IN", "train.bin"):
        assert way in problem.next
    assert [p.name for p in (tmp_path / "data").iterdir()] == [".lock"]

    def refuse(*place, **given):
        raise ConnectionError("403 for url: https://cdn.example/x.parquet?Signature=s3cr3t (x)")

    monkeypatch.setattr("datasets.load_dataset_builder", refuse)
    problem = refused("data.unreadable", prepare_dataset, hub_settings, tmp_path)
    assert "403 for url: https://cdn.example/x.parquet (x)" in problem.what
    assert "s3cr3t" not in str(problem)


def test_without_the_package(streamed, pages, tmp_path, monkeypatch, refused):
    find_spec = importlib.util.find_spec
    lacking = lambda name: None if name == "datasets" else find_spec(name)  # noqa: E731
    monkeypatch.setattr(hub, "find_spec", lacking)
    problem = refused("env.missing-package", prepare_dataset, streamed(), tmp_path)
    assert "make setup EXTRAS=datasets" in problem.next
    monkeypatch.undo()
    folder = prepare_dataset(streamed(), tmp_path)
    # Not for data that is prepared.
    monkeypatch.setattr(hub, "find_spec", lacking)
    assert prepare_dataset(streamed(), tmp_path) == folder


def damage_page(path):
    content = np.fromfile(path, dtype=np.uint8)
    content[4:400] = 255
    content.tofile(path)


def without_pages(folder):
    for path in folder.rglob("*.parquet"):
        path.unlink()


def written(name, content):
    return lambda folder: (folder / f"{name}.parquet").write_bytes(content)


def table(**columns):
    return lambda folder: pq.write_table(pa.table(columns), folder / "000_00000.parquet")


@pytest.mark.parametrize(
    ("damage", "code", "details"),
    [
        (lambda folder: damage_page(folder / "000_00001.parquet"), "unreadable", "pages: "),
        (shutil.rmtree, "missing", "pages: "),
        (without_pages, "missing", "*.parquet"),
        (written("000_00000", b"x" * 99), "damaged", "000_00000.parquet: "),
        (written("000_00001", b""), "damaged", "000_00001.parquet: "),
        (table(body=["x"]), "invalid-format", "got columns body"),
        (table(text=["x", None]), "invalid-format", "NoneType in row 1"),
    ],
)
def test_a_bad_local_copy(damage, code, details, streamed, pages, tmp_path, refused):
    damage(tmp_path / "pages")
    assert details in str(refused(f"data.{code}", prepare_dataset, streamed(), tmp_path))
