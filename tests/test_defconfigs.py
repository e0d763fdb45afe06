"""I4: every setting of every defconfig and fragment takes effect."""

import re
import subprocess
from pathlib import Path

import pytest

from gpt2.config import Config
from gpt2.study.study_file import STUDIES
from lib.config.dotconfig import defconfig_layers, list_defconfigs
from lib.config.layers import parse_text, read_file
from lib.config.tree import KconfigTree
from lib.project import ROOT, python_module_command
from lib.runner.slurm import batch_script

RATIO, MECHANISMS, NSA, QUICKSTART = STUDIES.values()

DEFCONFIGS, FRAGMENTS = list_defconfigs(ROOT)
NAMES = [defconfig.name for defconfig in DEFCONFIGS]
PAIRS = [
    (base, fragment)
    for fragment in FRAGMENTS
    for base in (NAMES if fragment.bases == ("*",) else fragment.bases)
]
# Symbols that a hardware fragment may change without changing the global batch.
HARDWARE = {"DEVICE", "BATCH_SIZE", "GRAD_ACCUMULATION", "GPUS", "JOBS"}
# Symbols that are available only for one kind of device; most CPUs only emulate bf16.
OF_ONE_DEVICE = {"CUDNN_BENCHMARK", "DEVICE_CPU", "DEVICE_CUDA"}
PRECISION = {"PRECISION", "PRECISION_BF16", "PRECISION_FP32"}
MACHINES = {"a100", "a100-x2", "a10g-x4", "cpu", "h100", "w7900"}
# Fragments that set the environment policy, on any hardware.
ENVIRONMENTS = [fragment for fragment in FRAGMENTS if fragment.name.startswith("env-")]


@pytest.fixture(scope="module")
def tree():
    return KconfigTree(ROOT)


def resolved(tree, spec):
    return tree.resolve(defconfig_layers(ROOT, spec)).values


def assignments(layer):
    return {(assignment.name, assignment.value) for assignment in layer.assignments}


@pytest.mark.parametrize("defconfig", DEFCONFIGS, ids=NAMES)
def test_i4_defconfig_is_its_own_savedefconfig(tree, defconfig):
    layer = read_file(defconfig.path, "defconfig")
    minimal = parse_text(tree.minimal([layer]), "defconfig", "savedefconfig")
    assert assignments(layer) == assignments(minimal)


def test_every_defconfig_begins_with_a_summary():
    assert [each.name for each in (*DEFCONFIGS, *FRAGMENTS) if not each.summary] == []


@pytest.mark.parametrize("name", NAMES)
def test_i4_defconfig_is_a_valid_config(tree, name):
    Config.from_values(resolved(tree, name))


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda fragment: fragment.name)
def test_fragment_names_bases_that_exist(fragment):
    assert fragment.bases and set(fragment.bases) <= {"*", *NAMES}


@pytest.mark.parametrize(("base", "fragment"), PAIRS, ids=[f"{b}+{f.name}" for b, f in PAIRS])
def test_i4_fragment_takes_effect_on_its_base(tree, base, fragment):
    """Every assignment takes effect (resolving raises otherwise), and the base changes."""
    before = resolved(tree, base)
    after = resolved(tree, f"{base}+{fragment.name}")
    assert before != after
    Config.from_values(after)


@pytest.mark.parametrize(
    "fragment", [f for f in FRAGMENTS if f.name in MACHINES], ids=lambda fragment: fragment.name
)
def test_hardware_changes_what_fits_the_machine_and_nothing_else(tree, fragment):
    for base in fragment.bases:
        before = resolved(tree, base)
        after = resolved(tree, f"{base}+{fragment.name}")
        changed = {name for name in before if before[name] != after[name]}
        assert changed <= HARDWARE | OF_ONE_DEVICE | (
            PRECISION | {"COMPILE"} if fragment.name == "cpu" else set()
        )


@pytest.mark.parametrize("defconfig", DEFCONFIGS, ids=NAMES)
def test_a_defconfig_names_its_profile(tree, defconfig):
    """The default profile is a comment, because savedefconfig omits default values."""
    values, text = resolved(tree, defconfig.name), defconfig.path.read_text()
    on_gpu = values["DEVICE"] == "cuda"
    assert values["RUN_PROFILE"] == ("maxout_speed" if on_gpu else "paper_repro")
    assert ("CONFIG_RUN_PROFILE_MAXOUT_SPEED=y" in text) == on_gpu
    assert ("# Run profile: paper_repro, the default." in text) == (not on_gpu)


def test_paper_makes_the_large_ones_repeat_every_bit(tree):
    config = Config.from_values(resolved(tree, "gpt2-ratio-ablation+a100+paper"))
    assert config.repro.strict and config.model.attention.backend == "rows"
    assert (config.machine.precision, config.machine.matmul_precision) == ("fp32", "highest")
    assert config.machine.deterministic == "strict" and not config.machine.cudnn_benchmark


@pytest.mark.parametrize("fragment", ENVIRONMENTS, ids=lambda fragment: fragment.name)
def test_an_environment_changes_no_run(tree, fragment):
    for base in NAMES:
        before = Config.from_values(resolved(tree, base))
        after = Config.from_values(resolved(tree, f"{base}+{fragment.name}"))
        assert before.environment.policy == "any" != after.environment.policy
        assert before.hash8 == after.hash8


def test_a_cluster_changes_the_jobs_and_no_run(tree):
    for base in next(f.bases for f in FRAGMENTS if f.name == "slurm-a100"):
        before = Config.from_values(resolved(tree, f"{base}+a100"))
        after = Config.from_values(resolved(tree, f"{base}+a100+slurm-a100"))
        assert before.hash8 == after.hash8 and before.slurm != after.slurm
        script = batch_script(Path("results"), after.slurm, after.train.gpus, ["make"]).splitlines()
        sbatch = {line.removeprefix("#SBATCH ") for line in script if line.startswith("#SBATCH")}
        assert sbatch >= {"--array=1-10", "--partition=gpu", "--account=my-project", "--mem=64G"}
        assert sbatch >= {"--time=12:00:00", "--gres=gpu:a100:1", "--constraint=a100-80"}
        assert "--cpus-per-task=8" in sbatch and script.index("module load cuda/12") > len(sbatch)


def test_quick_runs_on_a_cpu_with_a_base_for_a_gpu(tree):
    config = Config.from_values(resolved(tree, "gpt2-ratio-ablation+cpu+quick"))
    assert config.model.num_params() == 124_475_904
    assert (config.machine.device, config.train.max_iters) == ("cpu", 3)
    assert config.data.dataset == "default"


def test_quickstart_is_large_enough_to_mean_something(tree):
    config = Config.from_values(resolved(tree, "gpt2-quickstart"))
    shape = config.model.shape
    assert (shape.n_layer, shape.n_embd, shape.block_size) >= (4, 128, 128)
    assert (config.data.tokenizer, config.machine.device) == ("byte", "cpu")
    assert config.study.output_dir == "results"


def test_the_small_studies_have_one_model_and_one_training(tree):
    quickstart, ratio = (resolved(tree, f"gpt2-{n}") for n in ("quickstart", "ratio-small"))
    differing = {name for name in ratio if ratio[name] != quickstart[name]}
    assert differing == {"ABLATION_STUDY", "VERDICT_BAND", "VERDICT_LOOKS", "VERDICT_SPEND"}


def test_ratio_ablation_is_the_published_setting(tree):
    """Most settings are defaults, which must not change under the study."""
    values = resolved(tree, "gpt2-ratio-ablation")
    expected = {
        "RUN_MODE": "ra_mla_ablation_mode",
        "ABLATION_STUDY": "ratio",
        "RA_MLA_ABLATION_STEPS": "all",
        "OUTPUT_DIR": "test_matrix_results_ratio_ablation",
        "DATASET": "finewebedu",
        "TOKENIZER": "gpt2",
        "N_LAYER": 12,
        "N_HEAD": 12,
        "N_EMBD": 768,
        "BLOCK_SIZE": 1024,
        "DROPOUT": "0.1",
        "BIAS": True,
        "GLOBAL_BATCH": 64,
        "BATCH_SIZE": 8,
        "GRAD_ACCUMULATION": 8,
        "BUDGET": "iterations",
        "MAX_ITERS": 10400,
        "OPTIMIZER": "adamwspam",
        "LEARNING_RATE": "6e-4",
        "MIN_LEARNING_RATE": "6e-5",
        "WARMUP_STEPS": 2000,
        "LR_SCHEDULE": "cosine",
        "PRECISION": "bf16",
        "DEVICE": "cuda",
        "PRUNING": "none",
    }
    assert {name: values[name] for name in expected} == expected
    config = Config.from_values(values)
    assert config.train.tokens_per_iteration(config.model.shape.block_size) == 65_536
    assert config.model.num_params() == 124_475_904


@pytest.mark.parametrize(
    ("name", "study"),
    [
        ("gpt2-ratio-ablation", RATIO),
        ("gpt2-mechanisms", MECHANISMS),
        ("nsa-quickstart", NSA),
        ("gpt2-quickstart", QUICKSTART),
    ],
)
def test_a_defconfig_selects_its_study(tree, name, study):
    assert resolved(tree, name)["ABLATION_STUDY"] == study.name


def test_the_studies_differ_in_their_steps_alone(tree):
    ratio, mechanisms = (resolved(tree, f"gpt2-{n}") for n in ("ratio-ablation", "mechanisms"))
    assert {k for k in ratio if ratio[k] != mechanisms[k]} == {"ABLATION_STUDY", "OUTPUT_DIR"}


def test_defconfigs_select_their_run_mode(tree):
    modes = {name: resolved(tree, name)["RUN_MODE"] for name in NAMES}
    assert modes["gpt2-124m"] == modes["gpt2-shakespeare"] == "single_training"
    for name in ("quickstart", "ratio-small", "ratio-ablation", "mechanisms"):
        assert modes[f"gpt2-{name}"] == "ra_mla_ablation_mode"


def test_errors_beyond_kconfig_are_reported_before_anything_is_written(tmp_path):
    settings = "LEARNING_RATE=fast DROPOUT=2.0 GLOBAL_BATCH=9"
    command = python_module_command("lib.kablate", "defconfig", "gpt2-ratio-small")
    command += ["--set", settings, "-O", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    for symbol, value, code in (
        ("LEARNING_RATE", "'fast'", "config.wrong-type"),
        ("DROPOUT", "2.0", "config.out-of-range"),
        ("GLOBAL_BATCH", "GPUS=1 is 8", "config.conflict"),
    ):
        pattern = rf"SET: {symbol}: .*{value}.*\[{code}\]"
        assert re.search(pattern, done.stderr), pattern
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "spec, dataset", [("gpt2-shakespeare", "shakespeare"), ("gpt2-ratio-ablation", "default")]
)
def test_quick_replaces_a_corpus_only_where_it_is_a_large_download(spec, dataset):
    resolution = KconfigTree().resolve(defconfig_layers(ROOT, f"{spec}+quick"))
    assert Config.from_values(resolution.values).data.dataset == dataset


def test_a_long_run_of_nsa_is_one_that_can_be_stopped_and_pays(tree):
    config = Config.from_values(resolved(tree, "nsa-125m-production"))
    shape, train, nsa = config.model.shape, config.train, config.model.attention.pattern
    assert (shape.n_embd, shape.n_layer, shape.n_head, shape.block_size) == (768, 12, 12, 2048)
    assert config.model.attention.projection.n_kv_head == 2
    assert (config.machine.precision, config.model.grad_checkpointing) == ("bf16", True)
    assert (train.max_iters, train.checkpoint_interval, train.eval_interval) == (50000, 5000, 1000)
    assert (config.schedule.learning_rate, config.schedule.warmup_steps) == (2e-4, 2000)
    assert not nsa.selects_all(2048) and config.model.pairs_per_token() < 2049 / 2


def test_the_speed_of_nsa_is_measured_on_the_model_of_the_long_run(tree):
    fast, long = (resolved(tree, name) for name in ("nsa-perf", "nsa-125m-production"))
    same = {name for name in fast if name.startswith(("NSA_", "N_"))}
    # Ranges are those of one backend.
    same -= {name for name in same if name.startswith(("NSA_BACKEND", "NSA_RANGES"))}
    assert {name: fast[name] for name in same} == {name: long[name] for name in same}
    assert (fast["MAX_ITERS"], fast["JOBS"], fast["GLOBAL_BATCH"]) == (200, 1, long["GLOBAL_BATCH"])
