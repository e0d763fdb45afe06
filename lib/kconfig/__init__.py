"""Strict Kconfig configuration: every requested setting takes effect or is reported as an error.

    defconfig, fragments, SET ─ read_file, parse_set ─> Layers ─ Tree.resolve ─> Resolution
    Resolution ─ Tree.write_config ─> .config (and .config.origins, .config.old)
    .config ─ resolve_config ─> Resolution ─ write_constants ─> config.py ─ read_constants ─> values

kconfiglib parses the Kconfig files, evaluates them and renders ``.config``. kconfiglib only warns
about invalid assignments and drops them, so this package parses the files and verifies every
assignment.
"""

from lib.kconfig.constants import read_constants, write_constants
from lib.kconfig.defconfigs import Defconfig, defconfig_layers, list_defconfigs
from lib.kconfig.dotconfig import read_config, resolve_config
from lib.kconfig.describe import SymbolInfo
from lib.kconfig.layers import Assignment, Layer, Origin, Resolution, locate
from lib.kconfig.parse import parse_set, parse_text, read_file
from lib.kconfig.tree import Tree

__all__ = [
    "Assignment",
    "Defconfig",
    "Layer",
    "Origin",
    "Resolution",
    "SymbolInfo",
    "Tree",
    "defconfig_layers",
    "list_defconfigs",
    "locate",
    "parse_set",
    "parse_text",
    "read_config",
    "read_constants",
    "read_file",
    "resolve_config",
    "write_constants",
]
