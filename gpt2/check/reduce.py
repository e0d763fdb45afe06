"""The fewest symbols that still make a check fail, by delta debugging (Zeller and Hildebrandt 2002).

ddmin      Simplifying and Isolating Failure-Inducing Input, section 3
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpt2.check import CHECKS
from gpt2.check.cases import Case
from gpt2.check.draw import Settings, applicable, resolved
from gpt2.check.run import run_here
from gpt2.config import Config
from lib.errors import ConfigError
from lib.kconfig import Layer, Tree, parse_text

# For one configuration; what is left then may not be the fewest.
_PATIENCE_SECONDS = 120.0
# Whether a subset fails; None where it is no configuration.
Test = Callable[[Sequence[str]], bool | None]


def reduce_settings(settings: Mapping[str, str], check: str, build_dir: Path) -> Settings:
    """What of ``settings`` the check ``check`` still fails with; for a worker, as it loads torch.

    Whatever has not been tried within two minutes counts as needed.
    """

    patience_ends = time.monotonic() + _PATIENCE_SECONDS

    def fails(config: Config) -> bool:
        if time.monotonic() > patience_ends:
            return False
        case = Case("random", "random", "random", config)
        return run_here(case, [CHECKS[check]], {}, build_dir)[check].state == "failed"

    return reduce_to(Tree(), settings, fails)


def reduce_to(tree: Tree, settings: Mapping[str, str], fails: Callable[[Config], bool]) -> Settings:
    """The fewest of ``settings`` whose configuration ``fails``; all of them have to.

    A setting whose dependencies were left out is left out too.
    """
    full = differing(tree, settings)

    def subset(names: Sequence[str]) -> Settings:
        return applicable(tree, {name: full[name] for name in names})

    def test(names: Sequence[str]) -> bool | None:
        try:
            return fails(resolved(tree, subset(names)))
        except ConfigError:
            return None

    return subset(ddmin(list(full), test))


def differing(tree: Tree, settings: Mapping[str, str]) -> Settings:
    """What of ``settings`` is not the default already."""
    text = tree.minimal([Layer.of("defconfig", "random", settings)])
    return {a.name: a.value for a in parse_text(text, "defconfig", "random").assignments}


def ddmin(names: Sequence[str], test: Test) -> list[str]:
    """A subset that fails, and does not without any one of its names.

    Two names that only make a configuration without each other are tried together.
    """
    known: dict[tuple[str, ...], bool | None] = {}

    def asked(subset: list[str]) -> bool | None:
        key = tuple(subset)
        if key not in known:
            known[key] = test(subset)
        return known[key]

    if asked([]):
        return []
    found, pieces = list(names), 2
    while len(found) > 1:
        size = -(-len(found) // pieces)
        chunks = [found[i : i + size] for i in range(0, len(found), size)]
        rests = [[name for name in found if name not in chunk] for chunk in chunks]
        smaller = next((s for s in (*chunks, *rests) if s and asked(s)), None)
        if smaller is not None:
            pieces = 2 if smaller in chunks else max(2, pieces - 1)
            found = smaller
        elif pieces < len(found):
            pieces = min(len(found), 2 * pieces)
        else:
            break
    return _without_pairs(found, asked)


def _without_pairs(found: list[str], asked: Test) -> list[str]:
    """Leave out pairs of names of which neither can be left out alone."""
    bound = [name for name in found if asked([n for n in found if n != name]) is None]
    for pair in itertools.combinations(bound, 2):
        rest = [name for name in found if name not in pair]
        if rest and asked(rest):
            return ddmin(rest, asked)
    return found
