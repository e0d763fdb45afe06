"""I4: every setting of every defconfig and fragment takes effect."""

from pathlib import Path

import pytest

from gpt2.config import Config
from lib.config.dotconfig import defconfig_layers, list_defconfigs
from lib.config.layers import parse_text, read_file
from lib.config.tree import KconfigTree
from lib.project import ROOT
from lib.runner.slurm import batch_script

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


def test_the_small_studies_have_one_model_and_one_training(tree):
    quickstart, ratio = (resolved(tree, f"gpt2-{n}") for n in ("quickstart", "ratio-small"))
    differing = {name for name in ratio if ratio[name] != quickstart[name]}
    assert differing == {"ABLATION_STUDY", "VERDICT_BAND", "VERDICT_LOOKS", "VERDICT_SPEND"}


STUDY, SINGLE, MATRIX = "ra_mla_ablation_mode", "single_training", "test_matrix_mode"


@pytest.mark.parametrize(
    ("name", "mode", "study", "folder"),
    [
        ("gpt2-ratio-ablation", STUDY, "ratio", "test_matrix_results_ratio_ablation"),
        ("gpt2-ratio-small", STUDY, "ratio", "results"),
        ("gpt2-mechanisms", STUDY, "mechanisms", "test_matrix_results_mechanisms"),
        ("nsa-quickstart", STUDY, "nsa", "results"),
        ("gpt2-quickstart", STUDY, "quickstart", "results"),
        ("gpt2-124m", SINGLE, "", "results"),
        ("gpt2-shakespeare", SINGLE, "", "results"),
        ("nsa-125m-production", SINGLE, "", "nsa_125m_production"),
        ("nsa-perf", MATRIX, "", "nsa_perf"),
        ("test-matrix-optimizers", MATRIX, "", "results"),
    ],
)
def test_a_defconfig_selects_what_is_trained_and_where(tree, name, mode, study, folder):
    """The settings of the runs are frozen with their hashes: tests/gpt2/test_identity.py."""
    values = resolved(tree, name)
    found = [values[symbol] for symbol in ("RUN_MODE", "ABLATION_STUDY", "OUTPUT_DIR")]
    assert found == [mode, study, folder]
