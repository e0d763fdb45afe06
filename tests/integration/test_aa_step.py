"""A study with an A/A step end to end, and the training order of its runs."""

import json
from pathlib import Path

from lib.runs.record import JsonRecord
from lib.runs.run_dir import RunDir

# A model that learns more than 0.1 nats in a few steps.
LEARNING = {"MAX_ITERS": 12, "LEARNING_RATE": "3e-2", "MIN_LEARNING_RATE": "0"}


def starts(manifests: dict[Path, JsonRecord]) -> list[tuple[str, str]]:
    """Return slug and seed of each run, by the time of submission."""
    found = []
    for path, manifest in manifests.items():
        (attempt,) = manifest.value(list, "volatile", "attempts")
        slug, seed, _ = path.name.rsplit("-", 2)
        found.append((attempt["submitted_at"], slug, seed))
    return [(slug, seed) for _, slug, seed in sorted(found)]


def test_a_study_with_an_aa_step(build):
    settings = {**LEARNING, "RA_MLA_ABLATION_STEPS": "0,golden", "SEED_LIST": "1,2,3"}
    folder = build(**settings, RUN_PROFILE_MAXOUT_SPEED=True, DETERMINISTIC_OFF=True)
    code, table, said = folder.command("all")
    assert code == 0, said
    assert "baseline-aa" in table and "A/A step" in table and "REPEAT baseline-again" in table
    study = folder.path / "results/ratio"
    record = json.loads((study / "verdicts.json").read_text())
    (aa,) = record["aa_steps"]
    assert (aa["step"], aa["n"], record["planned_comparisons"]) == ("baseline-aa", 3, 1)
    # Blocks one after another, each in its own order.
    manifests = {p: JsonRecord.read(RunDir(p).manifest) for p in study.glob("*-s*-*")}
    order = starts(manifests)
    assert [seed for _, seed in order] == ["s1"] * 4 + ["s2"] * 4 + ["s3"] * 4
    blocks = [tuple(slug for slug, _ in order[i : i + 4]) for i in (0, 4, 8)]
    assert {(block[0], block[-1]) for block in blocks} == {("baseline", "baseline-again")}
    assert len(set(blocks)) > 1
    first = {path.name.rsplit("-", 2)[0]: path for path in manifests if "-s1-" in path.name}
    one, other = (manifests[first[slug]] for slug in ("baseline", "baseline-aa"))
    assert one.value(list, "init_weights_digest") != other.value(list, "init_weights_digest")
    streams = [manifest.value(dict, "rng", "streams") for manifest in (one, other)]
    assert {name for name in streams[0] if streams[0][name] != streams[1][name]} == {"init"}
    # Every other command takes the step as declared.
    for script, *words in (("audit", "--runs", "*"), ("status",), ("plan",), ("figures",)):
        code, _, said = folder.command(script, *words)
        assert code == 0, (script, said)
    pair = {"A": str(first["baseline"]), "B": str(first["baseline-aa"])}
    code, _, said = folder.command("compare", **pair, AXIS="INIT_STREAM")
    assert code == 0, said
    code, text, said = folder.command("verify-results", JSON="1")
    failed = [row["check"] for row in json.loads(text)["rows"] if row["verdict"] == "FAIL"]
    # Uncommitted code and a missing tag belong to the test's tree, not to the step.
    assert not {"settings", "symbols", "records", "effective batch"} & set(failed), said
