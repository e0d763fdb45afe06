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
        return _correlated(rng, studies, n, np.full(STEPS + 1, r))

    return draw


def _correlated(rng, studies, n, r_A):
    block = rng.standard_normal((studies, 1, n))
    own = rng.standard_normal((studies, STEPS + 1, n))
    r_A1 = r_A[:, None]
    return (np.sqrt(r_A1) * block + np.sqrt(1 - r_A1) * own) / np.sqrt(2 * (1 - min(r_A)))


def _scaled(scales: Callable) -> Callable:
    def draw(rng, studies, n):
        noise = rng.standard_normal((studies, STEPS + 1, n))
        return noise * scales(rng, studies)[..., None]

    return draw


def _steps(factor: float, count: int) -> Callable:
    """Return the scales of a study with ``count`` noisy steps, the last ones."""

    def scales(rng, studies):
        scale_SA = np.ones((studies, STEPS + 1))
        scale_SA[:, STEPS + 1 - count :] = factor
        return scale_SA

    return _scaled(scales)


def _lognormal(sigma: float) -> Callable:
    return _scaled(lambda rng, studies: rng.lognormal(0, sigma, (studies, STEPS + 1)))


def _baseline(factor: float) -> Callable:
    def scales(rng, studies):
        scale_SA = np.ones((studies, STEPS + 1))
        scale_SA[:, 0] = factor
        return scale_SA

    return _scaled(scales)


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
    losses = rng.standard_normal((studies, STEPS + 1, n))
    losses[:, 1:7] = losses[:, :1] + 1e-7 * losses[:, 1:7]
    return losses


def _drawn(name: str) -> Callable:
    def draw(rng, studies, n):
        size = (studies, STEPS + 1, n)
        return rng.standard_t(3, size) if name == "t" else rng.exponential(size=size)

    return draw


def _with_real(inner: Callable, real: int) -> Callable:
    """Return losses of which the first ``real`` steps differ by 6 standard deviations."""

    def draw(rng, studies, n):
        losses = inner(rng, studies, n)
        losses[:, 1 : 1 + real] -= _REAL * np.sqrt(2)
        return losses

    return draw


# Name → losses of null steps, and the number of first steps that are real.
NOISE: dict[str, tuple[Callable, int]] = {
    "equal, r 0": (_equal(0.0), 0),
    "equal, r 0.5": (_equal(0.5), 0),
    "equal, r 0.9": (_equal(0.9), 0),
    "halves r 0.8, 0.3": (_halves(0.8, 0.3), 0),
    "halves r 0.95, 0": (_halves(0.95, 0.0), 0),
    "lognormal 0.5": (_lognormal(0.5), 0),
    "lognormal 1": (_lognormal(1.0), 0),
    "one step x3": (_steps(3, 1), 0),
    "one step x7": (_steps(7, 1), 0),
    "one step x10": (_steps(10, 1), 0),
    "4 steps x3": (_steps(3, 4), 0),
    "half the steps x3": (_steps(3, 9), 0),
    "baseline x2": (_baseline(2), 0),
    "heavy tails": (_drawn("t"), 0),
    "skewed": (_drawn("exponential"), 0),
    "6 dead": (_dead, 0),
    "6 real": (_with_real(_equal(0.0), 6), 6),
    "14 real, 4 x3": (_with_real(_steps(3, 4), 14), 14),
    "14 real, 4 x5": (_with_real(_steps(5, 4), 14), 14),
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
    if order == "random":
        steps_SA = rng.permuted(steps_SA, axis=1)
    elif order == "reverse":
        steps_SA = steps_SA[:, ::-1]
    if chain:
        both_SA = np.maximum(steps_SA[:, 1:], steps_SA[:, :-1])
        return np.concatenate([steps_SA, both_SA], axis=1)
    return steps_SA


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
