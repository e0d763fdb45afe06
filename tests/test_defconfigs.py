"""I4: every setting of every defconfig and fragment takes effect."""

from pathlib import Path

import pytest

from gpt2.config import Config
from gpt2.study.resolve import resolve_study
from gpt2.study.study_file import STUDIES
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
def test_i4_defconfig_is_a_valid_config_for_its_device(tree, name):
    values = resolved(tree, name)
    Config.from_values(values)
    assert (values["RUN_PROFILE"] == "maxout_speed") == (values["DEVICE"] == "cuda")


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


@pytest.mark.parametrize("size", ["", "-small"])
def test_the_studies_of_modern_parts_end_in_each_other(tree, size):
    studies = {}
    for name in ("modern", "parts"):
        layers, study = defconfig_layers(ROOT, f"gpt2-{name}{size}"), STUDIES[name]
        block, _ = resolve_study(tree, layers, study, study.steps)
        studies[name] = {variant.slug: config for variant, config in block}
    modern, parts = studies["modern"], studies["parts"]
    assert parts["modern"].hash8 == modern["baseline"].hash8
    if not size:
        single = Config.from_values(resolved(tree, "gpt2-124m"))
        assert parts["baseline"].hash8 == single.hash8
