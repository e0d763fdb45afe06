"""Code that is edited while a run is in progress."""

from typing import Any

from gpt2.training import loop
from lib.files import sha256_file


def test_an_edit_during_the_run_is_flagged_and_the_first_digests_stay(
    configure, train, tmp_path, monkeypatch
):
    code = tmp_path / "module.py"
    code.write_text("x = 1\n")
    before = {str(code): sha256_file(code)}
    monkeypatch.setattr("gpt2.training.loop.loaded_source", lambda: before)
    saved = loop.save_checkpoint

    def edit_and_save(session: Any) -> None:
        code.write_text("x = 2222\n")
        saved(session)

    monkeypatch.setattr("gpt2.training.loop.save_checkpoint", edit_and_save)
    manifest = train(configure(MAX_ITERS=2)).manifest()
    assert manifest["code"]["changed_during_run"] == [str(code)]
    assert manifest["origin"]["sources"] == before
