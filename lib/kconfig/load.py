"""Parser of a tree's Kconfig files, isolated from the environment; rejects every parser warning."""

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
# with make defconfig-NAME SET="A=1 B=y"; make why SYM=A shows the origin of a value.
#
"""


class AtomicKconfig(Kconfig):
    """kconfiglib's tree with an atomic write of ``.config``.

    menuconfig saves through ``write_config`` too.
    """

    def config_text(self) -> str:
        """Return the full ``.config`` text of the current values."""
        return rendered(super().write_config)

    def minimal_text(self) -> str:
        """Return the settings that differ from their defaults, in savedefconfig format."""
        return rendered(lambda path: self.write_min_config(path, header=""))

    def write_config(
        self,
        filename: str | None = None,
        header: str | None = None,
        save_old: bool = True,
        verbose: None = None,
    ) -> str:
        """Write ``filename`` and return a message; kconfiglib's other arguments are unused."""
        assert filename is not None and header is None
        changed = save_config(Path(filename), self.config_text())
        return f"{'Configuration saved to' if changed else 'No change in'} {filename}"


def load_kconfig(root: Path) -> AtomicKconfig:
    """Parse ``root/Kconfig`` and every file that it sources.

    Raises ConfigError on a syntax error, an undefined symbol in a condition, any other parser
    warning, and unsupported constructs (tristate, hex, a choice without a name).
    """
    with _environment(
        srctree=str(root.resolve()),
        KCONFIG_CONFIG_HEADER=HEADER,
        KCONFIG_WARN_UNDEF="y",
        # Otherwise kconfiglib would import any module called kconfigfunctions on the path.
        KCONFIG_FUNCTIONS="lib.kconfig.no_such_module",
    ):
        try:
            kconf = AtomicKconfig("Kconfig", warn_to_stderr=False)
        except OSError as error:
            problem = Problem(
                "cannot read the Kconfig files", str(error), code="kconfig.unreadable"
            )
            raise ConfigError(problem) from None
        except KconfigError as error:
            problem = Problem(str(error).strip(), code="kconfig.syntax-error")
            raise ConfigError(problem) from None
    problems = [_from_warning(text) for text in kconf.warnings] + list(_unsupported(kconf))
    if problems:
        raise ConfigError(*problems)
    return kconf


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Replace the whole environment, so that Kconfig's $(NAME) means the same everywhere."""
    saved = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def _from_warning(text: str) -> Problem:
    text = text.removeprefix("warning: ")
    undefined = re.match(r"undefined symbol (\w+):", text)
    if not undefined:
        return Problem(text, code="kconfig.warning")
    where = ", ".join(re.findall(r"Referenced at (\S+:\d+)", text))
    what = f"{undefined.group(1)}: undefined symbol"
    return Problem(what, where, code="kconfig.undefined-symbol")


def _unsupported(kconf: Kconfig) -> Iterator[Problem]:
    for symbol in kconf.unique_defined_syms:
        if symbol.orig_type not in (BOOL, INT, STRING):
            what = f"{symbol.name}: unsupported type {TYPE_TO_STR[symbol.orig_type]}"
            yield Problem(what, definition(symbol), code="kconfig.unsupported-type")
    for choice in kconf.unique_choices:
        if choice.name is None:
            yield Problem(
                "choice without a name", definition(choice), code="kconfig.unnamed-choice"
            )
        elif choice.name in kconf.syms and kconf.syms[choice.name].nodes:
            what = f"{choice.name}: name of both a choice and a symbol"
            yield Problem(what, definition(choice), code="kconfig.duplicate-name")
