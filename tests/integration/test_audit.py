"""``make audit`` as a command line: run selection, output and exit codes."""

import json

from lib.errors import EXIT_CONFIG, EXIT_DONE, EXIT_INVALID
from lib.runs.run_dir import RunDir
from tests.integration.conftest import IN_PROCESS, SINGLE

SCRIPT = "audit"


def test_a_trained_run_is_judged_by_name_and_by_folder(build):
    folder = build(**SINGLE)
    code, _, said = folder.command(SCRIPT, RUNS="run*")
    assert code == EXIT_CONFIG and "[run.not-found]" in said
    code, _, said = folder.command(*IN_PROCESS)
    assert code == EXIT_DONE, said
    (path,) = folder.runs("")

    code, printed, said = folder.command(SCRIPT, RUNS="run*")
    assert (code, printed) == (EXIT_DONE, f"VALID   {path}\n"), printed + said
    # The folders beside the run, such as that of the figures, are not runs.
    (path.parent / "figures").mkdir()
    code, printed, said = folder.command(SCRIPT, RUNS=f"{path.parent}/*")
    assert (code, printed) == (EXIT_DONE, f"VALID   {path}\n"), printed + said

    summary = RunDir(path).summary
    summary.write_text(summary.read_text().replace('"val_loss": ', '"val_loss": 1'))
    code, printed, _ = folder.command(SCRIPT, RUNS=str(path))
    first, *findings = printed.splitlines()
    assert (code, first) == (EXIT_INVALID, f"INVALID {path}")
    assert any("summary.json: expected final.val_loss" in line for line in findings)
    code, printed, _ = folder.command(SCRIPT, RUNS=str(path), JSON="1")
    (run,) = json.loads(printed)["runs"]
    assert code == EXIT_INVALID and not run["valid"] and run["findings"][0]["file"]

    code, table, _ = folder.command("report")
    assert code == EXIT_DONE and "damaged" in table
