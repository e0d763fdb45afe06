"""What the Makefile offers."""

import re

_TARGETS = re.compile(r"^([a-z][a-z-]*):(?!=)", re.MULTILINE)
_SETTINGS = re.compile(r"^SETTINGS [:+]= (.*)$", re.MULTILINE)


def targets(makefile: str) -> set[str]:
    """The targets with a name of their own; patterns and generated ones are left out."""
    return set(_TARGETS.findall(makefile))


def settings(makefile: str) -> set[str]:
    """The variables that a user may set."""
    return set(" ".join(_SETTINGS.findall(makefile)).split())
