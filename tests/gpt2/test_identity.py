"""The identity of a run: no hash of a recorded configuration changes.

``tests/yardsticks/hashes.json`` has the digests of the version before the rule of declared off-values.
Write it again, by ``digests``, only with a change of the identity that makes all runs stale.
"""

import json
from collections.abc import Iterator, Sequence
from hashlib import sha256

import pytest

from gpt2.config import Config
from gpt2.study.resolve import resolve_step
from gpt2.study.study_file import STUDIES
from lib.config.dotconfig import defconfig_layers, list_defconfigs
from lib.config.layers import ConfigLayer, parse_command_line_settings
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from lib.files import canonical_json
from lib.project import ROOT

FROZEN = ROOT / "tests" / "yardsticks" / "hashes.json"
# The automatic number of threads is the machine's; since these hashes, defconfigs of a GPU compile.
RECORDED = "CPU_THREADS=2 COMPILE=n"
# On gpt2-124m, a single run on a GPU; each line touches a setting that a rule of the identity names.
SINGLE = """
LOSS_BACKEND_TORCH=y
LOSS_BACKEND_TRITON=y
DEVICE_CPU=y
DEVICE_CPU=y LOSS_BACKEND_TORCH=y
ACTIVATION_GELU_EXACT=y
MLP_SIZING_PARAMS=y
MLP_SIZING_PARAMS=y MODEL_PARAMS=110000000
MLP_SIZING_RATIO=y MLP_RATIO=2.5
INIT_STREAM=3
INIT_FROM=hf:gpt2
DATA_PARALLEL_FSDP=y GPUS=2 BATCH_SIZE=16 GRAD_ACCUMULATION=1 GLOBAL_BATCH=32 COMPILE=n
GPUS=2 BATCH_SIZE=16 GRAD_ACCUMULATION=1 GLOBAL_BATCH=32
BUDGET_FLOPS=y MAX_FLOPS=1e15
BUDGET_FLOPS=y MAX_FLOPS=2e15
BUDGET_TOKENS=y
BUDGET_TIME=y
OOM_FALLBACK=y
OOM_FALLBACK=n
COMPILE=n
COMPILE=y
GRAD_CHECKPOINTING=y
DDP_SAFE=y
CUDNN_BENCHMARK=y
ATTENTION_BACKEND_ROWS=y
ATTENTION_BACKEND_TRITON=y
POSITIONS_ROPE=y
ATTENTION_PROJECTION_GROUPED=y N_KV_HEAD=4
ATTENTION_PROJECTION_LATENT=y
ATTENTION_PATTERN_SLIDING=y
ATTENTION_PROJECTION_GROUPED=y N_KV_HEAD=4 ATTENTION_PATTERN_NSA=y
RECIPROCAL=y
RECIPROCAL=y RECIPROCAL_LEARNABLE=y
RA_CROSS_TOKEN=y RA_CROSS_TOKEN_MODE_RMS=y
MLP_ATTN_GATE=y
MLP_CROSS_TOKEN=y
ATTENTION_PROJECTION_LATENT=y MLP_LATENT=y
OPTIMIZER_SGD=y
OPTIMIZER_ADAM=y
OPTIMIZER_ADAMWADV=y
OPTIMIZER_ADAMWSPAM=y
OPTIMIZER_ADAMWPRUNE=y
OPTIMIZER_ADAMWPRUNE=y ADAMWPRUNE_BASE_ADAMWSPAM=y
PRUNING_MAGNITUDE=y
PRUNING_MOVEMENT=y
LR_SCHEDULE_WSD=y
SEED=9
""".strip().splitlines()


def specs() -> list[str]:
    """Return every defconfig, and every fragment on each of its bases."""
    defconfigs, fragments = list_defconfigs(ROOT)
    names = [defconfig.name for defconfig in defconfigs]
    return names + [
        f"{base}+{fragment.name}"
        for fragment in fragments
        for base in (names if fragment.bases == ("*",) else fragment.bases)
    ]


def configurations(everything: bool = True) -> Iterator[tuple[str, Config]]:
    """Yield configurations with their key in the frozen file.

    Unless ``everything``, a fragment is resolved without the steps of the studies.
    """
    tree = KconfigTree(ROOT)
    for spec in specs():
        base = defconfig_layers(ROOT, spec, RECORDED)
        yield spec, Config.from_values(tree.resolve(base).values)
        # The environment changes no run.
        if "+" not in spec or (everything and "+env-" not in spec):
            yield from _steps(tree, spec, base)
    for settings in SINGLE:
        layers = defconfig_layers(ROOT, "gpt2-124m", RECORDED)
        layers.append(parse_command_line_settings(settings))
        yield settings, Config.from_values(tree.resolve(layers).values)


def _steps(
    tree: KconfigTree, spec: str, base: Sequence[ConfigLayer]
) -> Iterator[tuple[str, Config]]:
    """Yield the steps of every study that the configuration ``spec`` can train."""
    for name, study in STUDIES.items():
        for step in study.steps:
            try:
                yield f"{spec} {name}/{step.slug}", resolve_step(tree, base, study, step)[1]
            except ConfigError:
                continue


def digests(config: Config) -> str:
    """Return the hash of a configuration, and that of the function that it computes."""
    function = sha256(canonical_json(config.function()).encode()).hexdigest()
    return f"{config.hash8} {function[:8]}"


@pytest.mark.slow
@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.long)])
def test_no_hash_of_a_recorded_configuration_changed(everything):
    groups = json.loads(FROZEN.read_text())
    frozen = {key: digest for group in groups for key, digest in group.items()}
    now = {key: digests(config) for key, config in configurations(everything)}
    absent = frozen.keys() - now.keys()
    # Of steps with a fragment.
    assert all("+" in key.split()[0] for key in absent) and not (everything and absent)
    assert {key: now[key] for key in frozen.keys() & now if now[key] != frozen[key]} == {}
