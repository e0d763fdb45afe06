"""Removal of runs, and archives: what they contain, and what a damaged or hostile one does."""

import gzip
import hashlib
import io
import json
import os
import tarfile

import pytest

from gpt2.records.archive import LISTING, remove_runs, unpack, write_archive
from gpt2.records.listing import list_runs, select
from lib.errors import ConfigError
from lib.runs.audit import artifact_findings
from lib.runs.lease import DEFAULT_SECONDS, take_lease
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir, RunStatus, State, read_status, write_status
from tests.lib.fabricated import write_run


@pytest.fixture
def results(tmp_path):
    """Return a folder with two finished runs, a failed, a running and a replaced one."""
    folder = tmp_path / "results"
    for name in ("base-s1-aaaaaaaa", "ra-s1-bbbbbbbb", "base-s1-aaaaaaaa.old-20260101-000000"):
        run = write_run(folder / "ratio" / name)
        (run.checkpoints / "10").mkdir(parents=True)
        (run.checkpoints / "10" / "model.safetensors").write_text("large")
        run.trackers.mkdir()
        run.tracker_log("wandb").write_text("log")
    for name, state in (("ra-s2-cccccccc", State.FAILED), ("ra-s3-dddddddd", State.RUNNING)):
        run = RunDir(folder / "ratio" / name)
        run.path.mkdir()
        write_status(run, RunStatus(state))
    (folder / "ratio" / "table.md").write_text("table")
    return folder


def content(folder):
    """Return {path: bytes} of all files of a folder."""
    paths = (p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in paths}


class TestRemoval:
    @pytest.mark.parametrize(
        ("where", "names"),
        [
            ("state=failed", ["ra-s2-cccccccc"]),
            ("state=replaced", ["base-s1-aaaaaaaa.old-20260101-000000"]),
            ("run=ratio/ra-*", ["ra-s1-bbbbbbbb", "ra-s2-cccccccc", "ra-s3-dddddddd"]),
        ],
    )
    def test_selected_runs_are_removed_and_no_others(self, results, where, names):
        before = {path.name for path in (results / "ratio").iterdir()}
        listed = select(list_runs(results, replaced=True), where)
        assert remove_runs(listed.runs, results) == []
        assert before - {path.name for path in (results / "ratio").iterdir()} == set(names)

    def test_a_locked_run_and_a_link_stay(self, results, tmp_path):
        outside = write_run(tmp_path / "elsewhere" / "x-s1-eeeeeeee").path
        (results / "ratio" / "x-s1-eeeeeeee").symlink_to(outside)
        held = results / "ratio" / "ra-s1-bbbbbbbb"
        with take_lease(RunDir(held), DEFAULT_SECONDS):
            reasons = remove_runs(list_runs(results).runs, results)
        assert [reason.partition(":")[0] for reason in reasons] == [
            "ratio/ra-s1-bbbbbbbb",
            "ratio/x-s1-eeeeeeee",
        ]
        assert held.is_dir() and outside.is_dir() and len(list_runs(results).runs) == 2

    def test_an_interrupted_removal_leaves_no_run(self, results, monkeypatch):
        def interrupt(path):
            raise KeyboardInterrupt

        listed = select(list_runs(results), "state=failed")
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr("shutil.rmtree", interrupt)
            remove_runs(listed.runs, results)
        assert [run.state for run in list_runs(results).runs].count("failed") == 0
        remove_runs([], results)
        assert not list(results.glob("*/.removed-*"))


class TestArchive:
    @pytest.mark.parametrize("weights", [False, True])
    def test_unpacked_runs_have_the_same_files(self, results, tmp_path, weights):
        (tmp_path / ".config").write_text("SEED=1\n")
        path, there = tmp_path / "a.tar.gz", tmp_path / "there"
        with take_lease(RunDir(results / "ratio" / "ra-s3-dddddddd"), DEFAULT_SECONDS):
            listed = list_runs(results)
        packed = write_archive(listed, path, weights=weights, config=tmp_path / ".config")
        assert packed.skipped == ["ratio/ra-s3-dddddddd: running"]
        unpacked = unpack(path, there, tmp_path / "new.config")
        assert unpacked.new == packed.runs and (tmp_path / "new.config").read_text() == "SEED=1\n"
        kept = {
            name: data
            for name, data in content(results).items()
            if not any(part in name for part in ("checkpoints", "trackers", ".old-", "ra-s3"))
            and (weights or not name.endswith("model.safetensors"))
        }
        found = content(there)
        assert {name: found[name] for name in kept} == kept
        added = {name.rpartition("/")[2] for name in found.keys() - kept.keys()}
        assert added == (set() if weights else {LISTING})
        assert all(not p.name.startswith(".unpacked") for p in there.iterdir())

    def test_commands_of_an_archive_are_left_out(self, results, tmp_path, capsys):
        config, path = tmp_path / ".config", tmp_path / "a.tar.gz"
        text = "CONFIG_SEED=1\nCONFIG_ON_DONE_CMD={}\nCONFIG_SLURM_SETUP={}\n"
        config.write_text(text.format('"rm x"', '"rm y" '))
        write_archive(list_runs(results), path, weights=False, config=config)
        unpack(path, tmp_path / "there", tmp_path / "new.config")
        assert (tmp_path / "new.config").read_text() == text.format('""', '""')
        assert capsys.readouterr().err.count("rm ") == 2

    def test_the_file_of_an_own_study_comes_along(self, results, tmp_path):
        config, study = tmp_path / ".config", tmp_path / "mine.toml"
        config.write_text("SEED=1\n")
        study.write_text('name = "mine"\n')
        path, there = tmp_path / "a.tar.gz", tmp_path / "b"
        write_archive(list_runs(results), path, weights=False, config=config, study_file=study)
        unpack(path, there / "results", there / ".config")
        assert (there / "study.toml").read_text() == study.read_text()

    def test_equal_runs_give_equal_archives(self, results, tmp_path):
        listed = list_runs(results)
        for name in ("a", "b"):
            write_archive(listed, tmp_path / name, weights=True, config=tmp_path / "none")
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
        with pytest.raises(ConfigError, match="exists"):
            write_archive(listed, tmp_path / "a", weights=True, config=tmp_path / "none")

    def test_weights_left_out_are_no_finding_and_lost_ones_are(self, results, tmp_path):
        run = RunDir(results / "ratio" / "base-s1-aaaaaaaa")

        def lacks_weights(run):
            findings = artifact_findings(RunRecord(run), every_byte=False)
            return run.weights.name in [finding.file for finding in findings]

        path = tmp_path / "a.tar.gz"
        write_archive(list_runs(results), path, weights=False, config=tmp_path / "none")
        unpack(path, tmp_path / "there", tmp_path / "c")
        assert not lacks_weights(RunDir(tmp_path / "there" / "ratio" / "base-s1-aaaaaaaa"))
        run.weights.unlink()
        assert lacks_weights(run)

    def test_what_is_there_is_never_replaced(self, results, tmp_path):
        path = tmp_path / "a.tar.gz"
        write_archive(list_runs(results), path, weights=True, config=tmp_path / "none")
        other = RunDir(results / "ratio" / "ra-s1-bbbbbbbb")
        other.summary.write_text("{}")
        before = content(results)
        unpacked = unpack(path, results, tmp_path / "c")
        assert unpacked.different == ["ratio/ra-s1-bbbbbbbb"] and not unpacked.new
        assert len(unpacked.same) == 3 and content(results) == before

    def test_a_link_in_a_run_is_named_and_not_followed(self, results, tmp_path):
        secret = tmp_path / "secret"
        secret.write_text("key")
        (results / "ratio" / "base-s1-aaaaaaaa" / "link").symlink_to(secret)
        packed = write_archive(
            list_runs(results), tmp_path / "a", weights=True, config=tmp_path / "none"
        )
        assert any("link" in reason for reason in packed.skipped)
        assert not any(name.endswith("link") for name in packed.files)


def pack(path, members, runs=("s/r-s1-aaaaaaaa",), **listing):
    """Write an archive by hand; ``listing`` replaces fields of the listing."""
    files = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data, _ in members
    }
    record = {"schema_version": 1, "runs": list(runs), "without": [], "files": files} | listing
    with gzip.open(path, "wb") as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name, data, kind in [(LISTING, json.dumps(record).encode(), tarfile.REGTYPE), *members]:
            member = tarfile.TarInfo(name)
            member.size, member.type = (len(data), kind) if kind == tarfile.REGTYPE else (0, kind)
            member.linkname = "/etc/passwd"
            tar.addfile(member, io.BytesIO(data))


FILE = ("s/r-s1-aaaaaaaa/status.json", b"{}", tarfile.REGTYPE)


@pytest.mark.parametrize(
    ("members", "listing"),
    [
        ([("../evil", b"x", tarfile.REGTYPE)], {}),
        ([("/tmp/evil", b"x", tarfile.REGTYPE)], {}),
        ([("s/r-s1-aaaaaaaa/../../../evil", b"x", tarfile.REGTYPE)], {}),
        ([("s/.git/config", b"x", tarfile.REGTYPE)], {}),
        ([("s/r-s1-aaaaaaaa/link", b"", tarfile.SYMTYPE)], {}),
        ([("s/r-s1-aaaaaaaa/pipe", b"", tarfile.FIFOTYPE)], {}),
        ([FILE], {"runs": ["s/../../x"]}),
        ([FILE], {"runs": "s"}),
        ([FILE], {"files": {}}),
        ([FILE], {"files": {FILE[0]: {"bytes": 2, "sha256": "0" * 64}}}),
        ([FILE], {"files": {FILE[0]: {"bytes": 3, "sha256": "0" * 64}}}),
        ([], {"files": {FILE[0]: {"bytes": 2, "sha256": "0" * 64}}}),
    ],
)
def test_a_hostile_archive_writes_nothing(tmp_path, members, listing):
    pack(tmp_path / "a.tar.gz", members, **listing)
    with pytest.raises(ConfigError) as error:
        unpack(tmp_path / "a.tar.gz", tmp_path / "results", tmp_path / "c")
    assert error.value.problems[0].code == "archive.damaged"
    assert os.listdir(tmp_path / "results") == [] and sorted(os.listdir(tmp_path)) == [
        "a.tar.gz",
        "results",
    ]


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.8])
def test_a_shortened_archive_writes_nothing(tmp_path, share):
    path = tmp_path / "a.tar.gz"
    pack(path, [FILE])
    unpack(path, tmp_path / "right", tmp_path / "c")
    assert read_status(RunDir(tmp_path / "right/s/r-s1-aaaaaaaa")) is not None
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(ConfigError) as error:
        unpack(path, tmp_path / "results", tmp_path / "c")
    assert error.value.problems[0].code == "archive.damaged"
    assert os.listdir(tmp_path / "results") == []
