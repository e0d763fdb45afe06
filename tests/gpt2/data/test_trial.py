"""Plans and checks try the split that ``make`` will make, and write nothing."""

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


REFUSED: dict[str, tuple[dict[str, bytes], dict[str, str], str]] = {
    "no text": ({"texts/a.txt": b"", "texts/b.txt": b""}, {}, "data.empty-split"),
    "one character": ({"texts/a.txt": b"1"}, {}, "data.empty-split"),
    "a signature": ({"texts/a.txt": b"\xef\xbb\xbf\r\n"}, {}, "data.empty-split"),
    "held-out signature": (
        {"texts/a.txt": b"text\n" * 99, "held.txt": b"\xef\xbb\xbf"},
        {"custom_val_path": "held.txt"},
        "data.empty-split",
    ),
    "no held-out token": (
        {"texts/train.bin": bytes(400), "texts/val.bin": b""},
        {"custom_format": "bin"},
        "data.empty-split",
    ),
    "no predicted token": (
        {"texts/train.bin": bytes(400), "texts/val.bin": b"\1\0"},
        {"custom_format": "bin"},
        "data.empty-split",
    ),
    "a short text": ({"texts/a.txt": b"a short text\n"}, {}, "data.too-small"),
    "equal": (
        {"texts/a.txt": b"held out\n", "held.txt": b"held out\n"},
        {"custom_val_path": "held.txt"},
        "data.split-overlap",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_make_would_refuse(case, config, tmp_path, refused):
    files, changes, code = REFUSED[case]
    (tmp_path / "texts").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    problem = refused(code, try_preparation, config(**changes), tmp_path, 128)
    assert not (tmp_path / "data").exists()
    if code == "data.empty-split":
        assert "CUSTOM_VAL_PATH" in problem.next
    if code != "data.too-small":
        refused(code, prepare_dataset, config(**changes), tmp_path)
        assert [p.name for p in (tmp_path / "data").iterdir()] == [".lock"]


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
