"""Reduction of a failing configuration by delta debugging (Zeller and Hildebrandt 2002).

ddmin Simplifying and Isolating Failure-Inducing Input, section 3
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

# Limit for one configuration; after it, the result may not be minimal.
_TIME_LIMIT_SECONDS = 120.0
# Returns whether a subset fails, or None if it is not a valid configuration.
Test = Callable[[Sequence[str]], bool | None]


def reduce_settings(settings: Mapping[str, str], check: str, build_dir: Path) -> Settings:
    """Return a minimal subset of ``settings`` that still fails ``check``; runs in a worker.

    Settings not tested within two minutes are kept.
    """

    deadline = time.monotonic() + _TIME_LIMIT_SECONDS

    def fails(config: Config) -> bool:
        if time.monotonic() > deadline:
            return False
        case = Case("random", "random", "random", config)
        return run_here(case, [CHECKS[check]], {}, build_dir)[check].state == "failed"

    return reduce_to(Tree(), settings, fails)


def reduce_to(tree: Tree, settings: Mapping[str, str], fails: Callable[[Config], bool]) -> Settings:
    """Return a minimal subset of ``settings`` whose configuration ``fails``.

    ``settings`` itself must fail. Removing a setting also removes the settings that depend on it.
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
    """Return the subset of ``settings`` that differs from the defaults."""
    text = tree.minimal([Layer.of("defconfig", "random", settings)])
    return {a.name: a.value for a in parse_text(text, "defconfig", "random").assignments}


def ddmin(names: Sequence[str], test: Test) -> list[str]:
    """Return a subset that fails, and passes without any one of its names.

    Two names that are only valid together are removed together.
    """
    results: dict[tuple[str, ...], bool | None] = {}

    def cached_test(subset: list[str]) -> bool | None:
        key = tuple(subset)
        if key not in results:
            results[key] = test(subset)
        return results[key]

    if cached_test([]):
        return []
    failing, pieces = list(names), 2
    while len(failing) > 1:
        size = -(-len(failing) // pieces)
        chunks = [failing[i : i + size] for i in range(0, len(failing), size)]
        rests = [[name for name in failing if name not in chunk] for chunk in chunks]
        reduced = next((s for s in (*chunks, *rests) if s and cached_test(s)), None)
        if reduced is not None:
            pieces = 2 if reduced in chunks else max(2, pieces - 1)
            failing = reduced
        elif pieces < len(failing):
            pieces = min(len(failing), 2 * pieces)
        else:
            break
    return _without_pairs(failing, cached_test)


def _without_pairs(failing: list[str], test: Test) -> list[str]:
    """Remove pairs of names that cannot be removed alone."""
    dependent = [name for name in failing if test([n for n in failing if n != name]) is None]
    for pair in itertools.combinations(dependent, 2):
        rest = [name for name in failing if name not in pair]
        if rest and test(rest):
            return ddmin(rest, test)
    return failing
