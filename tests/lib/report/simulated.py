"""Simulated studies: losses with the noise of the section Simulations of docs/verdicts.md, and the
rules of lib/report/statistics.py over all studies at once.

A study is an array of losses SAN: studies, arms (the baseline first), seeds. Differences are SCN:
studies, contrasts, seeds. The standard deviation of a difference is near 1.
"""

from collections.abc import Callable, Sequence

import numpy as np

from lib.report.statistics import PART_FACTOR, t_isf

STEPS = 18
# Steps 15 to 18 are noisy in some rows; see NOISE.
_REAL = 6.0


def _equal(r: float) -> Callable:
    """Return losses whose differences have standard deviation 1; a block shares the part r."""

    def draw(rng, studies, n):
        block, own = rng.standard_normal((studies, 1, n)), _normal(rng, studies, n)
        return (np.sqrt(r) * block + np.sqrt(1 - r) * own) / np.sqrt(2 * (1 - r))

    return draw


def _normal(rng, studies, n):
    return rng.standard_normal((studies, STEPS + 1, n))


def _noisy(factor: float, first: int, last: int = STEPS) -> Callable:
    """Return losses of which those of the arms ``first`` to ``last`` are noisier."""

    def draw(rng, studies, n):
        losses = _normal(rng, studies, n)
        losses[:, first : last + 1] *= factor
        return losses

    return draw


def _lognormal(sigma: float) -> Callable:
    def draw(rng, studies, n):
        noise = _normal(rng, studies, n)
        return noise * rng.lognormal(0, sigma, (studies, STEPS + 1))[..., None]

    return draw


def _halves(high: float, low: float) -> Callable:
    """Return losses of which half of the steps follow the block's noise more than the others."""

    def draw(rng, studies, n):
        baseline = rng.standard_normal((studies, 1, n))
        own = rng.standard_normal((studies, STEPS, n))
        r_C1 = np.repeat([high, low], STEPS // 2)[:, None]
        steps = r_C1 * baseline + np.sqrt(1 - r_C1**2) * own
        return np.concatenate([baseline, steps], axis=1)

    return draw


def _dead(rng, studies, n):
    losses = _normal(rng, studies, n)
    losses[:, 1:7] = losses[:, :1] + 1e-7 * losses[:, 1:7]
    return losses


def _with_real(inner: Callable, real: int) -> Callable:
    """Return losses of which the first ``real`` steps differ by 6 standard deviations."""

    def draw(rng, studies, n):
        losses = inner(rng, studies, n)
        losses[:, 1 : 1 + real] -= _REAL * np.sqrt(2)
        return losses

    return draw


# Name → losses of null steps, and the number of first steps that are real.
NOISE: dict[str, tuple[Callable, int]] = {
    **{f"equal, r {r:g}": (_equal(r), 0) for r in (0.0, 0.5, 0.9)},
    "halves r 0.8, 0.3": (_halves(0.8, 0.3), 0),
    "halves r 0.95, 0": (_halves(0.95, 0.0), 0),
    **{f"lognormal {sigma:g}": (_lognormal(sigma), 0) for sigma in (0.5, 1.0)},
    **{f"one step x{factor}": (_noisy(factor, STEPS), 0) for factor in (3, 7, 10)},
    "4 steps x3": (_noisy(3, STEPS - 3), 0),
    "half the steps x3": (_noisy(3, STEPS - 8), 0),
    "baseline x2": (_noisy(2, 0, 0), 0),
    "heavy tails": (lambda rng, studies, n: rng.standard_t(3, (studies, STEPS + 1, n)), 0),
    "skewed": (lambda rng, studies, n: rng.exponential(size=(studies, STEPS + 1, n)), 0),
    "6 dead": (_dead, 0),
    "6 real": (_with_real(_equal(0.0), 6), 6),
    **{f"14 real, 4 x{f}": (_with_real(_noisy(f, STEPS - 3), 14), 14) for f in (3, 5)},
}


def differences(losses_SAN: np.ndarray, real: int, chain: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the differences SCN, and whether each contrast C is null.

    ``chain`` adds the comparison of each step with the step before it.
    """
    d_SCN = losses_SAN[:, 1:] - losses_SAN[:, :1]
    null_C = np.arange(1, STEPS + 1) > real
    if chain:
        d_SCN = np.concatenate([d_SCN, losses_SAN[:, 2:] - losses_SAN[:, 1:-1]], axis=1)
        moved = (np.arange(1, STEPS + 1) <= real).astype(int)
        null_C = np.concatenate([null_C, moved[1:] == moved[:-1]])
    return d_SCN, null_C


def arrivals(rng, studies: int, order: str, chain: bool) -> np.ndarray:
    """Return when each contrast SC has its runs, if one step of each study is trained after another.

    ``order`` is random, forward or reverse. A contrast of two steps waits for both.
    """
    steps_SA = np.arange(STEPS)[None].repeat(studies, axis=0)
    if order != "forward":
        steps_SA = rng.permuted(steps_SA, axis=1) if order == "random" else steps_SA[:, ::-1]
    both_SA = np.maximum(steps_SA[:, 1:], steps_SA[:, :-1])
    return np.concatenate([steps_SA, both_SA], axis=1) if chain else steps_SA


def critical(p: float, degrees: np.ndarray) -> np.ndarray:
    values, inverse = np.unique(degrees, return_inverse=True)
    return np.array([t_isf(p, float(v)) for v in values])[inverse].reshape(degrees.shape)


def words_of(
    d_SCN: np.ndarray,
    looks: Sequence[tuple[int, float]],
    variance: str = "shared",
    band: float = 0.0,
    arrived_SC: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the word SC of each contrast after ``looks`` (seeds, share of alpha), and its look.

    A word is 0 (none), 1 (differs) or 2 (equal); a look is a position in ``looks``. A contrast with
    a word keeps its variance, with its number of seeds, in the mean. Those that have not
    ``arrived_SC`` wait.
    """
    studies, m, _ = d_SCN.shape
    arrived_SC = np.ones((studies, m), bool) if arrived_SC is None else arrived_SC
    alpha = 0.05 / (1 if arrived_SC.all() or variance == "own" else PART_FACTOR)
    word_SC, look_SC = np.zeros((2, studies, m), int)
    variance_SC, seeds_SC = np.full((studies, m), np.nan), np.zeros((studies, m))
    for position, (n, share) in enumerate(looks):
        d = d_SCN[:, :, :n]
        rounds = np.abs(d).max(axis=2) < 1e-5
        waits = (word_SC == 0) & ~rounds & arrived_SC
        sd, distance = d.std(axis=2, ddof=1), np.abs(d.mean(axis=2))
        variance_SC, seeds_SC = np.where(waits, sd**2, variance_SC), np.where(waits, n, seeds_SC)
        differs, equal = (
            (_own if variance == "own" else _shared)(
                waits, word_SC, variance_SC, seeds_SC, (distance, sd, n), sides, alpha * share, code
            )
            for distance, sides, code in ((distance, 2, 1), (band - distance, 1, 2))
        )
        equal = (equal | ((word_SC == 0) & rounds)) & (band > 0)
        look_SC = np.where(differs | equal, position, look_SC)
        word_SC = np.where(equal, 2, np.where(differs, 1, word_SC))
    return word_SC, look_SC


def _shared(waits, word, variances, seeds, sample, sides, alpha, code):
    distance, sd, n = sample
    # Without any judged contrast there is no median.
    known = np.where((~np.isnan(variances)).any(axis=1, keepdims=True), variances, 0)
    live = ~np.isnan(variances) & (variances > 1e-6 * np.nanmedian(known, axis=1, keepdims=True))
    weights, count = np.where(live, seeds - 1, 0), live.sum(axis=1, keepdims=True)
    mean = (weights * np.where(live, variances, 0)).sum(axis=1, keepdims=True)
    mean = mean / np.maximum(weights.sum(axis=1, keepdims=True), 1)
    wide = np.sqrt(np.where(live, np.maximum(variances, mean), sd**2))
    degrees = np.where(live, (n - 1) * 3 * count / (count + 2), n - 1)
    limit = critical(alpha / (sides * word.shape[1]), degrees)
    gate = t_isf(0.05 / sides, n - 1)
    passes = distance >= limit * wide / np.sqrt(n)
    return waits & passes & ((distance >= gate * sd / np.sqrt(n)) | (count == 1))


def _own(waits, word, variances, seeds, sample, sides, alpha, code):
    distance, sd, n = sample
    m = word.shape[1]
    t_SC = np.where(waits, distance / np.where(waits, sd, 1) * np.sqrt(n), -np.inf)
    limits = np.array([t_isf(alpha / (sides * (m - k)), n - 1) for k in range(m)] + [np.inf] * m)
    if not (waits | (word > 0)).all():
        # Nothing steps down before all have arrived.
        limits[:m] = limits[0]
    # A contrast that this family has rejected is no longer counted.
    rejected = (word == code).sum(axis=1, keepdims=True)
    order = np.argsort(-t_SC, axis=1)
    reached = np.take_along_axis(t_SC, order, axis=1) >= limits[rejected + np.arange(m)]
    passed = np.cumprod(reached, axis=1).astype(bool)
    result = np.zeros(t_SC.shape, bool)
    np.put_along_axis(result, order, passed, axis=1)
    return result
