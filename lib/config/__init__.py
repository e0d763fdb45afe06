"""Strict Kconfig configuration: every requested setting takes effect or is reported as an error.

    defconfig, fragments, SET ─ read_file, parse_set ─> Layers ─ Tree.resolve ─> Resolution
    Resolution ─ Tree.write_config ─> .config (and .config.origins, .config.old)
    .config ─ resolve_config ─> Resolution ─ write_constants ─> config.py ─ read_constants ─> values

kconfiglib parses the Kconfig files, evaluates them and renders ``.config``. kconfiglib only warns
about invalid assignments and drops them, so this package parses the files and verifies every
assignment.
"""

from lib.config.dotconfig import (
    Defconfig,
    defconfig_layers,
    list_defconfigs,
    read_config,
    read_constants,
    resolve_config,
    write_constants,
)
from lib.config.layers import (
    Assignment,
    ConfigLayer,
    ResolvedConfig,
    ValueOrigin,
    parse_command_line_settings,
    parse_text,
    read_file,
    with_locations,
)
from lib.config.tree import KconfigTree, SymbolInfo

__all__ = [
    "Assignment",
    "ConfigLayer",
    "Defconfig",
    "KconfigTree",
    "ResolvedConfig",
    "SymbolInfo",
    "ValueOrigin",
    "defconfig_layers",
    "list_defconfigs",
    "parse_command_line_settings",
    "parse_text",
    "read_config",
    "read_constants",
    "read_file",
    "resolve_config",
    "with_locations",
    "write_constants",
]
