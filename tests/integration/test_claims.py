"""``make claims`` end to end: true, false, damaged and wrong claims."""

import json
import re
import subprocess
import sys

import pytest

from lib.project import ROOT
from lib.report.claims import read_claims

SCRIPT = "claims"
OWN = ROOT / "docs/claims.toml"
CLAIM = """[[claim]]
name = "loss"
text = "the loss"
step = "baseline"
field = "val_loss"
value = "9.999"
"""


def test_claims_of_a_trained_run(build):
    folder = build()
    file, outputs = folder.path / "claims.toml", folder.path / "paper"
    assert folder.command("all", STEPS="0")[0] == 0
    file.write_text(CLAIM)
    code, text, said = folder.command(SCRIPT, STEPS="0", OUT=str(outputs))
    assert code == 1 and "quoted 9.999, found " in text and "claims.toml:1" in text
    assert not outputs.exists() and "SKIP" in said

    (found,) = re.findall(r"found ([0-9.]+)", text)
    file.write_text(CLAIM.replace("9.999", found))
    code, text, said = folder.command(SCRIPT, STEPS="0", OUT=str(outputs))
    assert code == 0 and "HOLDS   loss: " in text, said
    (run,) = folder.runs("0")
    manifest = json.loads((run / "manifest.json").read_text())
    for name in ("claims.tex", "claims.md"):
        written = (outputs / name).read_text()
        assert run.name.replace("--", "- -") in written and manifest["run"]["run_id"] in written
        assert f"commit {manifest['code']['git_sha'][:12]}" in written
    code, text, _ = folder.command(SCRIPT, STEPS="0", OUT=str(outputs), JSON="1")
    assert code == 0 and json.loads(text)["claims"][0]["problems"] == []

    # Runs of another configuration support nothing.
    code, text, _ = folder.command(SCRIPT, STEPS="0", SET="MAX_ITERS=7")
    assert code == 1 and re.search(r"baseline-s1-\w{8}: new", text)

    (run / "per_query.csv").write_bytes((run / "per_query.csv").read_bytes() + b"\n")
    code, text, _ = folder.command(SCRIPT, STEPS="0")
    assert code == 4 and run.name in text

    file.write_text(CLAIM.replace('"9.999"', "9.999"))
    code, _, said = folder.command(SCRIPT, STEPS="0")
    assert code == 2 and "claims.toml:6" in said and "[claims.invalid-value]" in said


def test_the_documents_of_this_project_quote_its_claims():
    for claim in read_claims(OWN)["claims"]:
        assert claim["value"] in (OWN.parent / claim["document"]).read_text()


@pytest.mark.long
def test_the_claims_of_this_project_hold(tmp_path):
    make = ["make", f"O={tmp_path}", f"PYTHON={sys.executable}"]
    claims = ["claims", f"CLAIMS={OWN}", f"OUT={tmp_path}"]
    for words in (["defconfig-gpt2-quickstart"], ["all"], claims):
        done = subprocess.run(
            [*make, *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("HOLDS") == len(read_claims(OWN)["claims"])
