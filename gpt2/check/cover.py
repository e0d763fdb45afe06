"""The steps on which costly checks run: few that have every option of all. Imports no torch."""

from collections.abc import Sequence
from itertools import combinations

from gpt2.check.cases import CheckCase
from gpt2.config import Config


def covering_steps(cases: Sequence[CheckCase]) -> list[str]:
    """Return the slugs of the first case and of few others, which have every option of all.

    An option is a choice, a flag, a number that is zero or not, or a pair of components; numbers
    that differ are checked for every step. Each next case has the most options that are missing.
    """
    options = {case.slug: _options(case.config) for case in cases if case.config}
    chosen = list(options)[:1]
    missing = set().union(*options.values()).difference(*(options[slug] for slug in chosen))
    while missing:
        best = max(options, key=lambda slug: len(options[slug] & missing))
        chosen.append(best)
        missing -= options[best]
    return [slug for slug in options if slug in chosen]


def components(config: Config) -> list[str]:
    """Return the names of the components that a step may have or not, in order of the model."""
    model = config.model
    added = (*model.attention.added, *model.mlp.mechanisms, *model.adapters)
    return [part.name for part in added]


def _options(config: Config) -> set[tuple[str, object]]:
    attention = config.model.attention
    parts = [attention.projection.name, attention.pattern.name, *components(config)]
    parts += [config.optimizer.name, f"pruning by {config.pruning.name}"]
    return {(name, _kind(value)) for name, value in config.values.items()} | set(
        combinations(parts, 2)
    )


def _kind(value: object) -> object:
    """Return a flag or choice as it is, and whether a number, also as text, is nonzero."""
    try:
        return value if isinstance(value, bool) else float(str(value)) != 0.0
    except ValueError:
        return value
