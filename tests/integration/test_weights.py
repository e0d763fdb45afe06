"""A run goes out to transformers and comes back in, through the command lines."""

from pathlib import Path

from lib.kconfig import Layer, Tree
from lib.rundir import RunDir
from tests.integration.conftest import SMALL

ONE = {"RA_MLA_ABLATION_MODE": None, "SINGLE_TRAINING": True}


def configure(folder, **changes):
    """Another configuration in a folder that is there."""
    given = {k: v for k, v in {**SMALL, **ONE, **changes}.items() if v is not None}
    Tree().write_config([Layer.of("defconfig", "test", given)], folder.path / ".config")


def test_out_in_and_changed_behind_our_back(build):
    folder = build(**ONE)
    code, _, said = folder.command("scripts/export.py", "run")
    assert code == 2 and "has not been trained" in said
    assert folder.command("scripts/run_test_matrix.py")[0] == 0
    code, printed, said = folder.command("scripts/export.py", "single/run s1")
    assert code == 0, said
    out = Path(printed.strip())

    configure(folder, INIT_FROM=f"hf:{out}", N_LAYER=1)
    code, _, said = folder.command("scripts/run_test_matrix.py")
    assert code == 2 and "N_LAYER=1, and theirs has n_layer=2" in said
    assert len(list((folder.path / "results/single").glob("run-*"))) == 1

    configure(folder, INIT_FROM=f"hf:{out}")
    code, _, said = folder.command("scripts/run_test_matrix.py")
    assert code == 0 and f"hf:{out}: every weight of" in said
    assert len(list((folder.path / "results/single").glob("run-*"))) == 2

    weights = RunDir(out).weights
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    code, _, said = folder.command("scripts/run_test_matrix.py")
    assert code == 2 and f"changed since: {weights}" in said and "STALE=rerun" in said

    weights.unlink()
    code, _, said = folder.command("scripts/train.py", SEEDS="2")
    assert code == 3 and f"{weights}: there is no such file" in said
