"""Plans and checks try the split that ``make`` will make, and write nothing."""

import re

import numpy as np
import pytest

from gpt2.check.cases import plan_cases
from gpt2.check.context import CheckContext
from gpt2.check.process_checks import check_data
from gpt2.check.subject import StepUnderTest
from gpt2.data import prepare
from gpt2.data.prepare import prepare_dataset, try_preparation
from lib.config.dotconfig import ConfigWorkspace, defconfig_layers
from lib.errors import DataError
from lib.kablate import call
from lib.project import ROOT
from tests.build_folder import write_build


def test_a_text_that_can_be_split_leaves_nothing_behind(config, texts, tmp_path, capsys):
    for name in sorted(texts)[3:]:
        (tmp_path / "texts" / name).unlink()
    (tmp_path / "texts" / "notes.md").write_text("")
    # The vocabulary of GPT-2 is not here, and not needed.
    try_preparation(config(tokenizer="gpt2"), tmp_path, 128)
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]
    printed = capsys.readouterr().err
    assert "1 *.md" in printed and "(3 and 3 pieces)" in printed


TEXT = "To be, or not to be, that is the question.\n" * 40


def tokens(dtype="<u2", above=0):
    """The ids of the text in a file."""
    return (np.array([*TEXT.encode()]) + above).astype(dtype).tobytes()


def files(train, val=tokens()):
    return {"texts/train.bin": train, "texts/val.bin": val}


HELD = {"custom_val_path": "held.txt"}
LINES, BIN = {"custom_format": "jsonl"}, {"custom_format": "bin"}
EMPTY, FORMAT = ("empty-split", "CUSTOM_VAL_PATH"), "invalid-format"
LLM_C = np.array([20240520, 1, 1720], "<i4").tobytes()
# Files, settings, and code and words of the problem.
REFUSED = {
    "no text": ({"texts/a.txt": b"", "texts/b.txt": b""}, {}, *EMPTY),
    "one character": ({"texts/a.txt": b"1"}, {}, *EMPTY),
    "a signature": ({"texts/a.txt": b"\xef\xbb\xbf\r\n"}, {}, *EMPTY),
    "held-out signature": ({"texts/a.txt": b"a" * 99, "held.txt": b"\xef\xbb\xbf"}, HELD, *EMPTY),
    "no held-out token": (files(bytes(400), b""), BIN, *EMPTY),
    "no predicted token": (files(bytes(400), b"\1\0"), BIN, *EMPTY),
    "a short text": ({"texts/a.txt": b"a short text\n"}, {}, "too-small", "a"),
    # A signature and other line ends hide no equal document.
    "equal": (
        {"texts/a.txt": b"held out\n", "held.txt": b"\xef\xbb\xbfheld out\r\n"},
        *(HELD, "split-overlap", "a.txt .*held.txt"),
    ),
    "not JSON": (b"{not json}", LINES, FORMAT, "d.jsonl:3: .*JSON"),
    "line of latin1": (b'{"text": "\xff"}', LINES, FORMAT, "d.jsonl:3: .*UTF-8"),
    "a list": (b'["text"]', LINES, FORMAT, "d.jsonl:3: .*list"),
    "no field": (b'{"body": "x"}', LINES, FORMAT, "d.jsonl:3: .*'text'"),
    "a number": (b'{"text": 3}', LINES, FORMAT, "d.jsonl:3: .*int"),
    "half a character": (b'{"text": "\\ud800"}', LINES, FORMAT, "d.jsonl:3: .*surrogate"),
    "32 bits": (files(tokens("<u4")), BIN, FORMAT, "train.bin: .*32 bits.*'<u4'"),
    "32 bits, swapped": (files(tokens(">u4")), BIN, FORMAT, "32 bits.*'>u4'"),
    "64 bits": (files(tokens("<i8")), BIN, FORMAT, "64 bits.*'<u8'"),
    "many ids": (files(tokens("<u4", 120_000)), BIN, FORMAT, "32 bits.*'<u4'"),
    "llm.c": (files(tokens(), LLM_C + tokens()), BIN, FORMAT, r"llm.c.*\+1025"),
    "NumPy": (files(tokens(), b"\x93NUMPY" + tokens()), BIN, FORMAT, "NumPy"),
    "odd size": (files(b"\1\0\2", b"\1\0"), BIN, FORMAT, "train.bin: .*odd"),
    "other ids": (files(b"\1\0\0\1\1\1", b"\1\0"), BIN, "tokenizer-mismatch", "token 2 .*got 257"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_make_would_refuse(case, config, tmp_path, refused):
    given, changes, code, words = REFUSED[case]
    if isinstance(given, bytes):
        given = {"texts/d.jsonl": b'{"text": "good"}\n\n' + given + b"\n"}
    (tmp_path / "texts").mkdir()
    for name, content in given.items():
        (tmp_path / name).write_bytes(content)
    problem = refused(f"data.{code}", try_preparation, config(**changes), tmp_path, 128)
    assert re.search(words, f"{problem} {problem.next}", re.DOTALL)
    assert not (tmp_path / "data").exists()
    if code != "too-small":
        refused(f"data.{code}", prepare_dataset, config(**changes), tmp_path)
        assert {path.name for path in (tmp_path / "data").glob("*")} <= {".lock"}


def test_what_is_not_tried_is_logged(config, texts, tmp_path, monkeypatch, capsys):
    try_preparation(config(custom_path="elsewhere"), tmp_path, 128)
    assert f"WARN    the split was not tried: {tmp_path}/elsewhere" in capsys.readouterr().err
    monkeypatch.setattr(prepare, "_TRIED_BYTES", 100)
    try_preparation(config(), tmp_path, 128)
    assert "NOTE    the split of" in capsys.readouterr().err
    monkeypatch.undo()
    prepare_dataset(config(), tmp_path)
    monkeypatch.setattr(prepare, "_write", None)
    try_preparation(config(), tmp_path, 128)


OWN = {"DATASET_CUSTOM": True, "CUSTOM_PATH": "texts", "CUSTOM_FORMAT_TEXT": True}


def check(build):
    """Return the properties of the findings of ``make check CHECKS=data``; absent data has brackets."""
    (case,) = plan_cases([ConfigWorkspace(ROOT, build).layer]).chosen
    with CheckContext(build) as context:
        findings = check_data(StepUnderTest(case, context))
    return [f"({f.property})" if f.absent else f.property for f in findings]


def test_plan_and_check_refuse_what_make_refuses(tmp_path):
    text = tmp_path / "texts" / "a.txt"
    text.parent.mkdir()
    text.write_text("1")
    base = defconfig_layers(ROOT, "gpt2-ratio-small")
    build = write_build(tmp_path, {**OWN, "SINGLE_TRAINING": True}, *base)
    with pytest.raises(DataError) as caught:
        call("plan", [f"--build-dir={build}"])
    assert caught.value.exit_code == 3 and caught.value.codes == ["data.empty-split"]
    assert check(build) == ["data.empty-split"]
    text.write_text("A line of text.\n" * 200)
    assert check(build) == ["(prepared-data)"]
    text.unlink()
    text.parent.rmdir()
    assert check(build) == ["(prepared-data)"]
