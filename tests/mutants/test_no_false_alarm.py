"""Without a fault, every check of every step of every defconfig passes."""

import pytest

from gpt2.check import command
from lib.config.dotconfig import list_defconfigs
from lib.project import ROOT
from tests.options import options

DEFCONFIGS = [base.name for base in list_defconfigs(ROOT)[0]]


@pytest.mark.long
@pytest.mark.parametrize("defconfig", DEFCONFIGS)
def test_no_false_alarm(defconfig, tmp_path):
    code, table = command.run(options("check", "-O", str(tmp_path), "--defconfig", defconfig))
    assert code == 0 and table.endswith(" 0 failed\n"), table
