"""Parses the Kconfig files of a tree, out of reach of the environment, and refuses loose ends."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kconfiglib import BOOL, INT, STRING, TYPE_TO_STR, Kconfig, KconfigError

from lib.errors import ConfigError, Problem
from lib.kconfig.check import definition
from lib.kconfig.save import rendered, save_config

HEADER = """\
#
# Kablate configuration, in full. Change it with make menuconfig, or load another
# with make defconfig-NAME SET="A=1 B=y"; make why SYM=A tells where a value is from.
#
"""


class AtomicKconfig(Kconfig):
    """kconfiglib's tree, whose ``.config`` is written so that a crash spoils nothing.

    menuconfig saves through ``write_config`` too.
    """

    def config_text(self) -> str:
        """The full ``.config`` of the present values."""
        return rendered(super().write_config)

    def minimal_text(self) -> str:
        """What differs from the defaults, as savedefconfig writes it."""
        return rendered(lambda path: self.write_min_config(path, header=""))

    def write_config(
        self,
        filename: str | None = None,
        header: str | None = None,
        save_old: bool = True,
        verbose: None = None,
    ) -> str:
        """Write ``filename`` and say so; kconfiglib's signature, of which only the name is used."""
        assert filename is not None and header is None
        changed = save_config(Path(filename), self.config_text())
        return f"{'Configuration saved to' if changed else 'No change in'} {filename}"


def load_kconfig(root: Path) -> AtomicKconfig:
    """Parse ``root/Kconfig`` and all that it sources.

    Raises ConfigError on a syntax error, an undefined symbol in a condition, any other warning of
    the parser, and on what values cannot express (tristate, hex, a choice without a name).
    """
    with _environment(
        srctree=str(root.resolve()),
        KCONFIG_CONFIG_HEADER=HEADER,
        KCONFIG_WARN_UNDEF="y",
        # Otherwise kconfiglib would import and run any module named kconfigfunctions it finds.
        KCONFIG_FUNCTIONS="lib.kconfig.no_such_module",
    ):
        try:
            kconf = AtomicKconfig("Kconfig", warn_to_stderr=False)
        except OSError as error:
            raise ConfigError(Problem("cannot read the Kconfig files", str(error))) from None
        except KconfigError as error:
            raise ConfigError(str(error).strip()) from None
    problems = [_from_warning(text) for text in kconf.warnings] + list(_unsupported(kconf))
    if problems:
        raise ConfigError(*problems)
    return kconf


@contextmanager
def _environment(**only: str) -> Iterator[None]:
    """Replace the whole environment: $(NAME) in a Kconfig file must mean the same everywhere."""
    saved = dict(os.environ)
    os.environ.clear()
    os.environ.update(only)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def _from_warning(text: str) -> Problem:
    text = text.removeprefix("warning: ")
    undefined = re.match(r"undefined symbol (\w+):", text)
    if not undefined:
        return Problem(text)
    where = re.findall(r"Referenced at (\S+:\d+)", text)
    return Problem(f"{undefined.group(1)} is used but defined nowhere", ", ".join(where))


def _unsupported(kconf: Kconfig) -> Iterator[Problem]:
    for symbol in kconf.unique_defined_syms:
        if symbol.orig_type not in (BOOL, INT, STRING):
            kind = TYPE_TO_STR[symbol.orig_type]
            yield Problem(f"{symbol.name}: type {kind} is not supported", definition(symbol))
    for choice in kconf.unique_choices:
        if choice.name is None:
            yield Problem("a choice needs a name", definition(choice))
        elif choice.name in kconf.syms and kconf.syms[choice.name].nodes:
            yield Problem(f"{choice.name} names a choice and a symbol", definition(choice))
