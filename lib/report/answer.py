"""What a study shows, in sentences: its size, rule and answer, and what warns of them.

The sentences count and name values of the document; they compute none.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from lib.report.text import count, is_own_test, p_equation, seeds_notes, warnings
from lib.units import signed

_RELATIONS = {
    "BETTER": "better than",
    "WORSE": "worse than",
    "EQUIVALENT": "equivalent to",
    "INCONCLUSIVE": "not shown to differ from",
}
# Of one, and of several.
_PHRASES = {
    "BETTER": ("is better", "are better"),
    "WORSE": ("is worse", "are worse"),
    "EQUIVALENT": ("is equivalent", "are equivalent"),
    "INCONCLUSIVE": ("is undecided", "are undecided"),
    "UNFAIR": ("is not comparable", "are not comparable"),
    "DIVERGED": ("diverged", "diverged"),
    None: ("has no word", "have no word"),
}

Values = Mapping[str, Any]


def summary(document: Values) -> str:
    """Return size and content of a study in words: variants, seeds and finished runs."""
    rows, runs = document["rows"], document["runs"]
    seeds = len({run["seed"] for run in runs})
    done = sum(run["state"] == "done" for run in runs)
    return (
        f"{count(len(rows), 'variant')}, {count(seeds, 'seed')}, {done} of {len(runs)} runs "
        "finished and comparable"
    )


def answer(document: Values) -> str:
    every = document["verdicts"]
    given = [verdict for verdict in every if verdict["verdict"]]
    if not any(run["state"] == "done" for run in document["runs"]):
        return "No run has a result yet."
    if not every:
        done = [row for row in document["rows"] if row["val_loss"] is not None]
        if len(done) != 1:
            return f"{count(len(done), 'variant')} with a loss; nothing is compared."
        loss = f"{done[0]['val_loss']:.4f} {document['unit']}"
        return f"The validation loss is {loss}; nothing is compared."
    if not given:
        return " ".join(seeds_notes(document)) or "No comparison has a word."
    verdicts = _answering(document)
    noun, other = _compared(document, verdicts[0]["role"])
    words = [verdict["verdict"] for verdict in verdicts]
    if len(verdicts) == 1 and words[0] in _RELATIONS:
        return _of_one(verdicts[0], document["unit"])
    counts = {word: words.count(word) for word in _PHRASES}
    phrases = [
        f"{counts[word]} {(one if counts[word] == 1 else many)}"
        for word, (one, many) in _PHRASES.items()
        if counts[word]
    ]
    if counts["BETTER"] or counts["WORSE"]:
        phrases[0] += f" than {other}"
    else:
        phrases.insert(0, f"none is shown to be better or worse than {other}")
    listed = " and ".join(filter(None, [", ".join(phrases[:-1]), phrases[-1]]))
    text = f"Of {count(len(verdicts), noun)}, {listed}"
    decided = [v for v in verdicts if v["verdict"] in ("BETTER", "WORSE")]
    if decided:
        largest = max(decided, key=lambda verdict: abs(verdict["difference"]))
        text += f"; the largest difference is that of {largest['step']}: {_difference(largest, document['unit'])}"
    return f"{text}."


def best_verdict(document: Values) -> Values | None:
    """Return the verdict with the best word, and the lowest loss among equal words, if any."""
    words = [v for v in _answering(document) if v["verdict"] in _FROM_BEST]
    given = [v for v in words if v["difference"] is not None]
    rank = _FROM_BEST.index
    return min(given, key=lambda v: (rank(v["verdict"]), v["difference"]), default=None)


_FROM_BEST = ("BETTER", "EQUIVALENT", "INCONCLUSIVE", "WORSE")


def _answering(document: Values) -> list[Values]:
    """Return the comparisons that answer the study: with the baseline, if there are any."""
    every = document["verdicts"]
    roles = [verdict["role"] for verdict in every]
    role = "baseline" if "baseline" in roles else roles[0] if roles else ""
    return [verdict for verdict in every if verdict["role"] == role]


def _compared(document: Values, role: str) -> tuple[str, str]:
    if document["not_estimable"] is not None:
        return "effect", "0"
    if not any(row["parent"] for row in document["rows"]):
        return "combination", "the first one"
    return "step", "the baseline" if role == "baseline" else "its parent"


def _difference(verdict: Values, unit: str) -> str:
    text = f"{signed(verdict['difference'])} {unit}"
    if verdict["interval_95"]:
        low, high = map(signed, verdict["interval_95"])
        text += f" (95 % interval {low} to {high})"
    return text + ", which is rounding" * verdict["rounding_only"]


def _of_one(verdict: Values, unit: str) -> str:
    relation = _RELATIONS[verdict["verdict"]]
    subject = f"{verdict['step']} is {relation} {verdict['reference'] or '0'}"
    # A p of 1 that no test gave says nothing: the interval does.
    is_tested = verdict["p_of_word"] is not None and not is_own_test(verdict)
    p = f", {p_equation(verdict['p_of_word'])}" if is_tested else ""
    return f"{subject}: {_difference(verdict, unit)}, n={verdict['n']}{p}."


def notices(document: Values) -> list[str]:
    """Return what a reader must see before any word: unstable runs, missing words, failed controls."""
    texts = []
    for state in ("diverged", "unstable"):
        seeds: dict[str, list[int]] = {}
        for run in document["runs"]:
            if run[state]:
                seeds.setdefault(run["variant"], []).append(run["seed"])
        names = [f"{name} (seed{'s' * (len(s) > 1)} {ranges(s)})" for name, s in seeds.items()]
        if names:
            texts.append(f"{state.capitalize()} training: {', '.join(names)}.")
    words = [verdict["verdict"] for verdict in document["verdicts"]]
    return texts + (seeds_notes(document) if any(words) else []) + warnings(document)


def ranges(numbers: Sequence[int]) -> str:
    groups = groupby(enumerate(numbers), lambda each: each[1] - each[0])
    parts = [[number for _, number in group] for _, group in groups]
    return ", ".join(f"{p[0]}–{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
