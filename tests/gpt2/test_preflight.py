"""Conditions for starting a run, and the number of concurrent runs; no GPU is required."""

import os
import re
import shutil
from dataclasses import replace

import pytest

from gpt2.running import launch, preflight
from gpt2.running.preflight import (
    TrainingPlace,
    bytes_needed,
    check_machine,
    conditions,
    describe,
    describe_text,
    long_run_problems,
)
from gpt2.study.plan import Plan
from gpt2.study.resolve import resolve_config
from lib.config.field import kconfig_fields
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.env import snapshot
from lib.env.options import EnvironmentConfig
from lib.env.packages import Interpreter
from lib.env.ranks import ProcessRank
from lib.errors import PreflightError, Problem
from lib.project import ROOT
from lib.runner.local import LocalExecutor
from lib.runner.runner import RunnerOptions
from lib.runs.run import Run, RunVariant
from lib.runs.run_dir import RunStatus, State
from tests.gpt2.slow_kernels import compile_slowly, refuse_a_second_process

SMALL = {
    "SINGLE_TRAINING": True,
    "DEVICE_CPU": True,
    "MODEL_SIZE_TINY": True,
    "GLOBAL_BATCH": 1,
    "BATCH_SIZE": 1,
    "GRAD_ACCUMULATION": 1,
}
LONG = {"MAX_ITERS": 50_000, "MODEL_SIZE_TINY": True}
EDITED = Problem("edited", code="code.uncommitted")
PAGE = (ROOT / "docs" / "environment.md").read_text()


def configured(**changes):
    """Return a small run on the CPU, with some symbols changed."""
    symbols = SMALL | changes
    if changes.get("DEVICE_CUDA"):
        del symbols["DEVICE_CPU"]
    return resolve_config(KconfigTree(), [ConfigLayer.of("test", "test", symbols)])


@pytest.fixture
def place(tmp_path):
    """Return empty folders in which uncommitted code is allowed."""
    return TrainingPlace(tmp_path / "build", tmp_path / "build" / "results", dirty=True)


def failing(config, place):
    """Return {unmet condition: its problems as text}."""
    found = conditions([config], place).items()
    return {name: "\n".join(map(str, problems)) for name, problems in found if problems}


def planned(place, **changes):
    config = configured(**changes)
    run = Run("single", RunVariant("run"), 1, config, place.results / "run")
    return Plan("single", place.results, place.build_dir, config, [run])


def test_a_resumed_run_requires_only_the_space_that_it_still_needs(place, monkeypatch):
    config = configured()
    needed = bytes_needed([config], 1)
    usage = shutil.disk_usage("/")._replace(free=needed - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "[disk.no-space]" in failing(config, place)["output folder"]
    assert "output folder" not in failing(config, replace(place, written_bytes=1))


def test_all_that_is_wrong_is_told_at_once(place, monkeypatch):
    monkeypatch.setattr("gpt2.running.preflight.uncommitted_problems", lambda *args: [EDITED])
    changes = {
        "ENV_POLICY_UV": True,
        "ENV_PYTHON": "2.7",
        "ENV_LOCK_FILE": "uv.lock",
        "MIN_DISK_GIB": 1_000_000,
        "DEVICE_CUDA": True,
        "CHECKPOINT_INTERVAL": 0,
        **LONG,
    }
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = configured(**changes)
    names = {"environment", "python", "lock file", "disk", "committed", "device", "long runs"}
    assert failing(config, place).keys() == names
    with pytest.raises(PreflightError) as refusal:
        check_machine([config], place)
    assert len(refusal.value.problems) >= 6 and refusal.value.exit_code == 3
    assert not place.results.exists()
    for words in ("ENV_PYTHON=2.7", "MIN_DISK_GIB=1000000", "[gpu.missing]"):
        assert words in str(refusal.value)


def test_two_gpus_where_one_is_pinned(place, monkeypatch):
    monkeypatch.setattr(preflight, "machine_problems", lambda machine, gpus: [])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    found = failing(configured(DEVICE_CUDA=True, GPU_PINNED=True), place)
    assert found.keys() == {"device"} and "[gpu.not-pinned]" in found["device"]


def test_equal_kernels_are_compared_once_and_those_without_dropout_beside(monkeypatch):
    compared = []
    monkeypatch.setattr(preflight, "usable_cores", lambda: 8)
    monkeypatch.setattr(
        preflight, "compare_kernels", lambda checks, processes: compared.extend(checks) or []
    )
    term = {"DEVICE_CUDA": True, "RECIPROCAL": True, "DROPOUT": "0.1"}
    term |= {"RUN_PROFILE_MAXOUT_SPEED": True}
    changes = [
        {},
        {"ACTIVATION_GELU_EXACT": True},
        {"ATTENTION_PROJECTION_LATENT": True},
        {"RECIPROCAL": False},
    ]
    assert preflight._kernel_problems([configured(**{**term, **c}) for c in changes]) == []
    models = [model for check, model, _ in compared if check.__name__ == "check_attention"]
    assert [(len(m.attention.terms), m.shape.dropout) for m in models] == [
        *((1, 0.1), (0, 0.1)),
        (1, 0.0),
    ]
    assert [check.__name__ for check, *_ in compared[3:]] == ["check_loss"]


def test_kernels_are_compiled_side_by_side(tmp_path, capsys, monkeypatch):
    # Without the modules of the kernels.
    monkeypatch.setattr(preflight, "LocalExecutor", lambda *given: LocalExecutor((), {}))
    checks = [(compile_slowly, name, tmp_path) for name in ("wrong", "right")]
    (problem,) = preflight.compare_kernels(checks, 4)
    assert problem.what == "differs"
    assert len({(tmp_path / name).read_text() for name in ("wrong", "right")}) == 2
    said = capsys.readouterr().err
    assert "2 at a time" in said and "kernels 2 of 2, eta 00:00" in said
    (died,) = preflight.compare_kernels([(compile_slowly, "crash", tmp_path)] * 2, 2)
    assert died.code == "worker.died"
    assert preflight.compare_kernels([(refuse_a_second_process, os.getpid())] * 2, 2) == []
    # In this process, one after the other.
    assert preflight.compare_kernels([(refuse_a_second_process, os.getpid())] * 3, 1) == []
    said = capsys.readouterr().err.splitlines()[-4:]
    assert "3 comparisons on the GPU, 1 at a time" in said[0]
    assert [line.split(", eta")[0] for line in said[1:]] == [
        f"CHECK   kernels {count} of 3" for count in (1, 2, 3)
    ]


def test_a_snapshot_is_taken_unless_it_is_not_wanted(place):
    without = configured(RUN_PROFILE_MAXOUT_SPEED=True, ENV_SNAPSHOT=False)
    check_machine([without], place)
    assert not place.build_dir.exists()
    check_machine([configured()], place)
    files = {path.name for path in (place.build_dir / "environment").iterdir()}
    nowhere = replace(place, build_dir=place.build_dir / "environment" / "hw.json")
    refused = failing(configured(), nowhere)
    assert refused.keys() == {"snapshot"} and "[disk.write-failed]" in refused["snapshot"]
    assert {"packages.txt", "hw.json", "nvidia_smi.txt", "snapshot.json"} <= files


def test_a_training_in_this_process_is_checked(place, monkeypatch):
    """By workers: tests/integration/test_commands.py."""
    for beyond in ("gpt2.running.launch.check_data", "gpt2.training.loop.train_run"):
        monkeypatch.setattr(beyond, lambda *given: pytest.fail("went on"))
    with pytest.raises(PreflightError, match="ENV_PYTHON=2.7"):
        launch.train_here(planned(place, ENV_PYTHON="2.7"), RunnerOptions(dirty=True))
    assert not place.results.exists()


@pytest.mark.parametrize(("ranks", "limits"), [(2, [900]), (1, [])])
def test_a_process_of_torchrun_ends_with_its_stacks_if_it_hangs(place, monkeypatch, ranks, limits):
    """A single process may be one in a debugger."""
    called = []
    ended = RunStatus(State.SUCCESS)
    monkeypatch.setattr(
        "faulthandler.dump_traceback_later", lambda seconds, exit: called.append(seconds)
    )
    monkeypatch.setattr(
        "gpt2.training.loop.train_run", lambda *given, **rest: ended if not given[3]() else None
    )
    monkeypatch.setattr(launch, "current_process", lambda: ProcessRank(1, ranks))
    plan = planned(place, GPUS=ranks, GLOBAL_BATCH=ranks)
    assert launch.train_here(plan, RunnerOptions()) == 0
    assert called == limits


def test_what_is_told_has_facts_and_conditions(place, monkeypatch, tmp_path):
    monkeypatch.setenv("NSA_USE_FA2", "1")
    (tmp_path / "file").write_text("")
    config = configured(ENV_PYTHON="2.7", **LONG)
    told = describe([config] * 2, replace(place, results=tmp_path / "file" / "results"))
    assert told["facts"]["run_profiles"] == ["paper_repro"] and told["facts"]["cpu_cores"] >= 1
    assert told["facts"]["variables_without_effect"] == ["NSA_USE_FA2"]
    assert told["passed"] is False
    text = describe_text(told)
    # Equal runs are one line.
    assert text.startswith(
        "RUN     7.2M parameters, 4 layers, 4 heads, 128 wide, context 128, dense full, learned "
        "positions, fp32 on cpu, 50,000 it x 128 tokens, adamw 0.0006, checkpoint every 500 it\nFACT"
    )
    for pattern in (
        r"^FACT    python +3\.\d+",
        r"^FAIL    python +ENV_PYTHON=2.7: .*\[env.wrong-python\]\n {8}see ",
        r"^OK      environment$",
        r"^FAIL    output folder",
    ):
        assert re.search(pattern, text, re.MULTILINE), pattern


def test_a_login_node_leaves_the_gpu_to_the_workers(place, monkeypatch):
    which = shutil.which
    installed = {"sbatch": "/usr/bin/sbatch"}
    monkeypatch.setattr(shutil, "which", lambda name: installed.get(name) or which(name))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
        monkeypatch.delenv(name)

    def report(**changes):
        return describe([configured(DEVICE_CUDA=True, **changes)], place)

    def untested(told):
        return [c["name"] for c in told["conditions"] if c["untested"]]

    # A workstation has sbatch too.
    assert not report()["passed"] and not untested(report())
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    told = report()
    assert told["passed"] and untested(told) == ["device", "kernels", "free GPUs"]
    assert len(re.findall("^SKIP ", describe_text(told), re.MULTILINE)) == 3
    # Of the environment, which the nodes share; a training on this machine is refused.
    assert not report(ENV_PYTHON="2.7")["passed"]
    with pytest.raises(PreflightError):
        check_machine([configured(DEVICE_CUDA=True)], place)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert not report()["passed"] and not untested(report())


def test_the_page_has_every_condition_symbol_and_file(place):
    _, conditions_table, _ = re.split(r"^(\| condition .*?)\n\n", PAGE, flags=re.M | re.S)
    named = re.findall(r"^\| (\w[\w ]*?) \|", conditions_table, re.MULTILINE)[1:]
    assert named == [*conditions([configured()], place)]
    symbols = {field.metadata["symbol"] for field in kconfig_fields(EnvironmentConfig)}
    assert [name for name in symbols if f"`{name}" not in PAGE] == []
    files = set(re.findall(r"^\| (`.+?) \|", PAGE.split("## The snapshot")[1], re.MULTILINE))
    listed = {name for cell in files for name in re.findall(r"`([^`]+)`", cell)}
    written = {path.name for path in (place.build_dir / "environment").iterdir()}
    conda = Interpreter("conda", "llmhe", "3.13.1", place.build_dir)
    for policy in ("conda", "uv", "venv"):
        written |= {*snapshot._commands(policy, conda)}
    assert listed == written | {"rocm_smi.txt"}


@pytest.mark.parametrize(("gpus", "threads", "slots"), [(2, 3, 2), (16, 1, 1)])
def test_on_a_cpu_a_slot_is_a_group_of_cores(monkeypatch, place, gpus, threads, slots):
    """Of GPUs: tests/integration/test_fake_gpus.py."""
    monkeypatch.setattr(preflight, "usable_cores", lambda: 12)
    config = configured(GPUS=gpus, GLOBAL_BATCH=gpus, CPU_THREADS=threads)
    assert check_machine([config], place) == [{}] * slots


def test_a_gpu_in_use_by_another_program_is_left_alone_and_named(monkeypatch, place, capsys):
    used = [300.0, 40_960.0, 900.0, None]
    readings = [{"index": i, "memory_used_mib": mib} for i, mib in enumerate(used)]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(preflight, "machine_problems", lambda machine, gpus: [])
    monkeypatch.setattr(preflight, "_kernel_problems", lambda configs: [])
    monkeypatch.setattr("lib.tracking.telemetry.read_gpus", lambda gpus, *, rocm: readings)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(readings))
    one, four = (configured(DEVICE_CUDA=True, GPUS=n, GLOBAL_BATCH=n) for n in (1, 4))
    slots = check_machine([one], place)
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["0", "2", "3"]
    assert "GPU 1 (40.0 GiB)" in capsys.readouterr().err
    with pytest.raises(PreflightError) as refused:
        check_machine([four], place)
    assert refused.value.codes == ["gpu.busy"] and "GPU 1" in str(refused.value)
    # A GPU that the user names is used.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert len(check_machine([one], place)) == 4


HOURS = {"BUDGET_TIME": True, "GPT2_MAX_TIME": 3600}
FAST = {"DEVICE_CUDA": True, "RUN_PROFILE_MAXOUT_SPEED": True}


@pytest.mark.parametrize(
    ("settings", "code", "values"),
    [
        (LONG | {"CHECKPOINT_INTERVAL": 0}, "no-checkpoint", "CHECKPOINT_INTERVAL=0 .*50,000 it"),
        (LONG | {"CHECKPOINT_INTERVAL": 50_000}, "no-checkpoint", "INTERVAL=50000 .*50,000 it"),
        (HOURS | {"CHECKPOINT_INTERVAL": 0}, "no-checkpoint", "CHECKPOINT_INTERVAL=0 .*3,600 s"),
        (LONG, "", ""),
        (LONG | {"CHECKPOINT_INTERVAL": 0, "LONG_RUN_ITERATIONS": 50_001}, "", ""),
        ({"CHECKPOINT_INTERVAL": 0, "MAX_ITERS": 1999}, "", ""),
        (HOURS | {"GPT2_MAX_TIME": 3599, "CHECKPOINT_INTERVAL": 0}, "", ""),
        # On a GPU, in bf16 or for a paper.
        (LONG | FAST, "fp32", "maxout_speed"),
        (LONG | FAST | {"PRECISION_BF16": True}, "", ""),
        (LONG | {"DEVICE_CUDA": True}, "", ""),
    ],
)
def test_a_long_run_without_checkpoints_or_in_fp32_is_refused(settings, code, values):
    found = long_run_problems(configured(**settings))
    assert [problem.code for problem in found] == [f"long-run.{code}"] * bool(code)
    assert all(re.search(values, problem.what) for problem in found)
