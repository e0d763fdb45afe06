"""``make claims`` end to end: true, false, updated, damaged and wrong claims."""

import json
import re
import subprocess
import sys

import pytest

from lib.claims.file import read_claims
from lib.project import ROOT

SCRIPT = "scripts/claims.py"
OWN = ROOT / "docs/claims.toml"
CLAIM = """# Kept.
[[claim]]
name = "loss"
text = "the loss"
cell = { run = "baseline", seed = 1, field = "val_loss" }
value = "9.999"
"""


def test_claims_of_a_trained_run(build):
    folder = build()
    file, outputs = folder.path / "claims.toml", folder.path / "paper"
    assert folder.command("scripts/run_test_matrix.py", STEPS="0")[0] == 0
    file.write_text(CLAIM)
    code, text, said = folder.command(SCRIPT, STEPS="0", OUT=str(outputs))
    assert code == 1 and "quoted 9.999, found " in text and "claims.toml:2" in text
    assert not outputs.exists() and "SKIP" in said and file.read_text() == CLAIM

    code, text, said = folder.command(SCRIPT, STEPS="0", OUT=str(outputs), UPDATE="1")
    assert code == 0 and "HOLDS   loss: " in text, said
    updated = file.read_text()
    assert re.search(r'^digest = "[0-9a-f]{16}"\n', updated, re.MULTILINE)
    assert updated.startswith("# Kept.\n") and "9.999" not in updated
    written = [(outputs / name).read_bytes() for name in ("claims.tex", "claims.md")]
    code, text, _ = folder.command(SCRIPT, STEPS="0", OUT=str(outputs), JSON="1")
    assert code == 0 and json.loads(text)["claims"][0]["holds"] is True
    assert [(outputs / name).read_bytes() for name in ("claims.tex", "claims.md")] == written
    (run,) = folder.runs("0")
    assert run.name.encode() in written[0] and file.read_text() == updated

    (run / "per_query.csv").write_bytes((run / "per_query.csv").read_bytes() + b"\n")
    code, text, _ = folder.command(SCRIPT, STEPS="0", UPDATE="1")
    assert code == 4 and run.name in text and file.read_text() == updated

    file.write_text(CLAIM.replace('"9.999"', "9.999"))
    code, _, said = folder.command(SCRIPT, STEPS="0")
    assert code == 2 and "claims.toml:6" in said and "[claims.invalid-value]" in said


def test_the_documents_of_this_project_quote_its_claims():
    for claim in read_claims(OWN).claims:
        assert claim.documents and claim.value
        for name in claim.documents:
            assert claim.value.number in (OWN.parent / name).read_text()


@pytest.mark.long
def test_the_claims_of_this_project_hold(tmp_path):
    make = ["make", f"O={tmp_path}", f"PYTHON={sys.executable}"]
    claims = ["claims", f"CLAIMS={OWN}", f"OUT={tmp_path}"]
    for words in (["defconfig-gpt2-quickstart"], ["STEPS=3"], claims):
        done = subprocess.run(
            [*make, *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("HOLDS") == len(read_claims(OWN).claims)
