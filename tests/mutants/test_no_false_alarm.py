"""Without a fault, every check of every step of every defconfig passes."""

import pytest

from gpt2.check.command import CheckRequest, check
from lib.project import ROOT

DEFCONFIGS = sorted(path.name for path in (ROOT / "defconfigs").iterdir() if path.is_file())


@pytest.mark.long
@pytest.mark.parametrize("defconfig", DEFCONFIGS)
def test_no_false_alarm(defconfig, tmp_path):
    code, table = check(CheckRequest(tmp_path, defconfig=defconfig))
    assert code == 0 and table.endswith(" 0 failed\n"), table
