"""Targets and variables of the Makefile."""

import re

_TARGETS = re.compile(r"^([a-z][a-z-]*):(?!=)", re.MULTILINE)
_SETTINGS = re.compile(r"^SETTINGS [:+]= (.*)$", re.MULTILINE)


def targets(makefile: str) -> set[str]:
    """Return the explicit targets, without pattern rules and generated targets."""
    return set(_TARGETS.findall(makefile))


def settings(makefile: str) -> set[str]:
    """Return the variables that a user may set."""
    return set(" ".join(_SETTINGS.findall(makefile)).split())
