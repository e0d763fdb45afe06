"""Strict Kconfig configuration: every requested setting takes effect or is reported as an error.

    defconfig, fragments, SET ─ defconfig_layers ─> layers ─ KconfigTree.resolve ─> ResolvedConfig
    ResolvedConfig ─ KconfigTree.write_config ─> .config (and .config.origins, .config.old)
    .config ─ read_config, KconfigTree.resolve, write_constants ─> config.py
    config.py ─ read_constants ─> values; .config, checked against it, is the layer below those of steps

kconfiglib parses the Kconfig files, evaluates them and renders ``.config``. kconfiglib only warns
about invalid assignments and drops them, so this package parses the files and verifies every
assignment.
"""
