"""Without a fault, every check of every step of every defconfig passes."""

import pytest

from gpt2.check import command
from lib.project import ROOT
from tests.options import options

DEFCONFIGS = sorted(path.name for path in (ROOT / "defconfigs").iterdir() if path.is_file())


@pytest.mark.long
@pytest.mark.parametrize("defconfig", DEFCONFIGS)
def test_no_false_alarm(defconfig, tmp_path):
    code, table = command.run(options("check", "-O", str(tmp_path), "--defconfig", defconfig))
    assert code == 0 and table.endswith(" 0 failed\n"), table
