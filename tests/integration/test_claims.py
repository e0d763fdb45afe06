"""The claims of this project's documents; tests/integration/test_trained.py has those of a user."""

import pytest

from lib.project import ROOT
from lib.report.claims import read_claims
from tests.make_command import make

OWN = ROOT / "docs/claims.toml"


def test_the_documents_of_this_project_quote_its_claims():
    for claim in read_claims(OWN)["claims"]:
        assert claim["value"] in (OWN.parent / claim["document"]).read_text()


@pytest.mark.long
def test_the_claims_of_this_project_hold(tmp_path):
    claims = ["claims", f"CLAIMS={OWN}", f"OUT={tmp_path}"]
    for words in (["defconfig-gpt2-quickstart"], ["all"], claims):
        done = make(f"O={tmp_path}", *words)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("HOLDS") == len(read_claims(OWN)["claims"])
