"""Export to transformers and import of the result, through the command lines."""

from pathlib import Path

from lib.runs.run_dir import RunDir
from tests.build_folder import write_build
from tests.integration.conftest import IN_PROCESS, SMALL

ONE = {"RA_MLA_ABLATION_MODE": None, "SINGLE_TRAINING": True, "MAX_ITERS": 2, "SAMPLE_TOKENS": 0}


def configure(folder, **changes):
    """Write another configuration into an existing folder."""
    ready = {**SMALL, **ONE, "CPU_THREADS": 1, **changes}
    symbols = {k: v for k, v in ready.items() if v is not None}
    write_build(folder.path, symbols)


def test_export_import_and_modified_weights(build):
    # With all cores, as by default.
    folder = build(**ONE)
    code, _, stderr = folder.command("export", "run")
    assert code == 2 and "[run.not-found]" in stderr
    assert folder.command("all")[0] == 0
    code, printed, stderr = folder.command("export", "single/run s1")
    assert code == 0, stderr
    out = Path(printed.strip())

    configure(folder, INIT_FROM=f"hf:{out}", N_LAYER=1)
    code, _, stderr = folder.command("all")
    assert code == 2 and "[weights.config-mismatch]" in stderr
    assert "N_LAYER: 1 " in stderr and "weights (2)" in stderr
    assert len(list((folder.path / "results/single").glob("run-*"))) == 1

    configure(folder, INIT_FROM=f"hf:{out}")
    code, _, stderr = folder.command("all")
    assert code == 0 and "INIT" in stderr and f"hf:{out}: " in stderr
    assert len(list((folder.path / "results/single").glob("run-*"))) == 2

    weights = RunDir(out).weights
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    code, _, stderr = folder.command("all")
    assert code == 2 and f"changed since: {weights}" in stderr and "ON_STALE=rerun" in stderr

    weights.unlink()
    code, _, stderr = folder.command(*IN_PROCESS, "--seed", "2")
    assert code == 3 and f"{weights}: " in stderr and "[weights.missing]" in stderr
