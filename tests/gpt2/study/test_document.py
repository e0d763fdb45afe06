"""What the report states beside its results."""

from gpt2.study.document import set_text
from lib.config.dotconfig import defconfig_layers
from lib.config.layers import parse_command_line_settings
from lib.config.tree import KconfigTree
from lib.project import ROOT


def test_the_command_repeats_settings_of_every_type():
    """Choices, also those whose members lack the prefix, bools, numbers and text with spaces."""
    settings = {
        "RUN_MODE": "test_matrix_mode",
        "ABLATION_DESIGN": "factorial",
        "ABLATION_FEATURES": "RECIPROCAL MLP_SIZING_RATIO+MLP_RATIO=2.5",
        "MODEL_SIZE": "custom",
        "N_LAYER": 3,
        "COMPILE": False,
        "LEARNING_RATE": "4e-3",
        "OUTPUT_DIR": "it's $HOME",
    }
    layers = defconfig_layers(ROOT, "gpt2-ratio-small")
    layer = parse_command_line_settings(set_text(settings))
    values = KconfigTree().resolve([*layers, layer]).values
    assert {name: values[name] for name in settings} == settings
