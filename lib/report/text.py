"""The words of a study's document: cells of a verdict, notes, and the answer in sentences.

Every rendering takes its words from here; the sentences count and name values of the document.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from lib.errors import EXIT_DONE, EXIT_FAILED, EXIT_INCONCLUSIVE, EXIT_NOT_COMPARABLE
from lib.report.contrasts import AA_ROLE
from lib.report.judge import AA_FAILED
from lib.report.options import short_unit
from lib.units import count, first_of, format_difference, format_interval, signed

# A document of a study, and one of its verdicts.
Document = Mapping[str, Any]
Verdict = Mapping[str, Any]

_SMALLEST_SHOWN_P = 1e-12
# Columns of a terminal and of Markdown.
LINE_WIDTH = 80
_DECIDED = ("BETTER", "WORSE")


# One verdict.


def verdict_word(verdict: Verdict) -> str:
    """Return the word with k/n of a diverged step, or +k further seeds of an open comparison."""
    word, reason = verdict["verdict"], verdict["reason"] or ""
    if word is None:
        return "-"
    if verdict["role"] == AA_ROLE:
        if word in _DECIDED:
            return AA_FAILED
        return f"A/A step {word if word in ('UNFAIR', 'DIVERGED') else 'passed'}"
    share = reason.partition(" ")[0]
    if word == "DIVERGED" and "/" in share:
        return f"{word} {share}"
    if word == "INCONCLUSIVE" and verdict["more_seeds"]:
        return f"{word} +{verdict['more_seeds']}"
    return word


def verdict_colour(verdict: Verdict) -> str:
    """Return the colour of a verdict; an A/A step has one only if it failed."""
    word = verdict["verdict"]
    if verdict["role"] == AA_ROLE:
        return "worse" if word in _DECIDED else "muted"
    return word.lower() if word else "muted"


def format_p(p: float | None) -> str:
    """Return p with two digits; "-" if there is none."""
    if p is None:
        return "-"
    return f"<{_SMALLEST_SHOWN_P:g}" if p < _SMALLEST_SHOWN_P else f"{p:.2g}"


def is_own_test(verdict: Verdict) -> bool:
    """Return whether only the comparison's own test was made: its 95 % interval contains 0."""
    return bool(verdict["gated"]) and verdict["verdict"] != "EQUIVALENT"


def p_cell(verdict: Verdict) -> str:
    """Return p of the test that was made: corrected for the family, or ``own`` and uncorrected."""
    own = is_own_test(verdict)
    return f"own {format_p(verdict['p_own'])}" if own else format_p(verdict["p_of_word"])


def difference_cell(verdict: Verdict) -> str:
    """Return the mean difference, with half of its 95 % interval if it was tested."""
    if verdict["difference"] is None:
        return "-"
    shown = format_difference(verdict["difference"])
    if verdict["interval_95"] is None:
        return shown
    low, high = verdict["interval_95"]
    return f"{shown} ± {(high - low) / 2:.4f}"


# All verdicts of a study.


def verdicts_exit_code(document: Document, *, strict: bool = False) -> int:
    """Return 4 if a verdict is UNFAIR or an A/A step failed, 1 if a step diverged, 5 if ``strict``
    and one is INCONCLUSIVE, else 0.
    """
    words = {verdict["verdict"] for verdict in document["verdicts"]}
    all_words = words | {verdict["verdict"] for verdict in document["aa_steps"]}
    if document["aa_failed"] or "UNFAIR" in all_words:
        return EXIT_NOT_COMPARABLE
    if "DIVERGED" in all_words:
        return EXIT_FAILED
    return EXIT_INCONCLUSIVE if strict and "INCONCLUSIVE" in words else EXIT_DONE


# Notes: each a sentence in one line, which a rendering folds.


def seeds_notes(document: Document) -> list[str]:
    """Return why comparisons have no verdict: too few seeds, or no look; empty if all have one."""
    least = document["rule"]["min_seeds"]
    waiting = [verdict for verdict in document["verdicts"] if not verdict["verdict"]]
    between = [v["reason"] or "no look is due" for v in waiting if v["n"] >= least]
    if between:
        without = count(len(between), "comparison")
        return [f"{without} without a word: {', '.join(sorted(set(between)))}."]
    counts = sorted({verdict["n"] for verdict in waiting if verdict["n"]})
    if not counts:
        return []
    shown, more = ", ".join(f"n={n}" for n in counts), document["more_seeds"]
    advice = f"; for {least} seeds, type {more}" if more else ""
    return [f"{shown}: no verdict, because other seeds can reverse a difference{advice}."]


def loss_note(document: Document) -> str:
    """Return the loss of a model that predicts token frequencies only, or the unit of all losses."""
    entropy = document["unigram_entropy"]
    if entropy is None:
        return f"Losses are in {document['unit']}."
    return f"{entropy:.4f} nats: the loss of token frequencies alone."


def warnings(document: Document) -> list[str]:
    """Return what a reader must see beside the words: A/A steps that failed, noise, repeats."""
    notes = []
    for verdict in document["aa_steps"]:
        if verdict["verdict"] and "passed" not in verdict_word(verdict):
            parts = [verdict["step"]]
            if verdict["interval_95"] is not None and verdict["difference"] is not None:
                parts += [format_difference(verdict["difference"])]
                parts += [format_interval(verdict["interval_95"])]
            notes.append(f"{verdict_word(verdict)}: {' '.join(parts)}, tested alone.")
    if document["aa_failed"] and not notes:
        notes = [f"{AA_FAILED} at an earlier look."]
    return [*notes, *_study_notes(document)]


def _study_notes(document: Document) -> Iterator[str]:
    unit = short_unit(document["unit"])
    for noise in document["noise"]:
        yield (
            f"NOISE {noise['comparison']}: {noise['factor']:.0f} times the deviation of the others, "
            "whose effects it hides, because the rule shared uses the mean variance."
        )
    for name, differences in document["repeats"].items():
        if differences:
            largest = max(map(abs, differences.values()))
            result = f"differs by up to {largest:.1e} {unit}" if largest else "is equal"
            yield f"REPEAT {name} {result} ({count(len(differences), 'seed')})."
    for name, reason in (document["not_estimable"] or {}).items():
        yield f"EFFECT  {name}: not estimable, because {reason}"
    by_factor: dict[str, list[str]] = {}
    for name, factor in (document["inflated_variances"] or {}).items():
        by_factor.setdefault(f"{factor:.2f}", []).append(name)
    for growth, names in by_factor.items():
        yield f"EFFECT  variance x {growth} because of missing cells: {', '.join(names)}"


def rule_sentence(document: Document) -> str:
    """Return the rule of the verdicts in one sentence; "" if nothing is compared."""
    rule = document["rule"]
    if not document["verdicts"]:
        return ""
    band = (
        f"band ±{rule['band']:g} {document['unit']}" if rule["band"] else "no band (VERDICT_BAND)"
    )
    compared = {
        "both": "each step is compared with the baseline and with its parent",
        "baseline": "each step is compared with the baseline",
        "parent": "each step is compared with its parent",
    }[rule["against"]]
    if not any(row["parent"] for row in document["rows"]):
        compared = "each combination is compared with the first one"
    if document["not_estimable"] is not None:
        compared = "each effect of the design is compared with 0"
    declared = ", declared before the first run" * document["is_declared_first"]
    return (
        f"Rule{declared}: {compared}; variance rule {rule['variance']}; at most "
        f"{rule['alpha']:g} probability of a false word in the whole study of "
        f"{count(document['planned_comparisons'], 'comparison')}; {band}; at least "
        f"{rule['min_seeds']} seeds."
    )


def legend(document: Document) -> list[str]:
    """Return the meaning of the columns of verdicts, the looks of the rule and its limits."""
    rule, verdicts = document["rule"], document["verdicts"]
    notes = [
        f"Δ: step - reference, mean over seeds ± half of its 95 % interval, {document['unit']}. p: "
        "corrected for all comparisons of the study."
    ]
    if any(map(is_own_test, verdicts)):
        notes.append(
            "own: the comparison's own 95 % interval contains 0, so it gets no word, and p is that of "
            "this test alone."
        )
    if looks := document["looks"]:
        counts = ", ".join(str(look["n"]) for look in looks)
        spent = f"{document['alpha_spent']:.3g} of {rule['alpha']:g}"
        notes.append(f"Looks at {counts} seeds spent {spent}.")
        if any(look["added"] for look in looks):
            notes.append("Comparisons added after a look are corrected for each other.")
    if (gain := document["pairing_gain"]) is not None:
        change = "removed" if gain >= 0 else "added"
        notes.append(f"Pairing by seed {change} {abs(gain):.0%} of the variance.")
    if limit := document["divergence_limit"]:
        notes.append(
            f"Diverged: 0 of {limit['n']} seeds of each step; its true rate may still be "
            f"{limit['rate']:.0%}."
        )
    # The best of many studies is selected, whatever the error of each.
    if others := document["same_documents"]:
        subject = "1 other study has" if len(others) == 1 else f"{len(others)} other studies have"
        notes.append(
            f"{subject} verdicts on these evaluation documents ({first_of(others)}): the error of "
            f"{rule['alpha']:g} is per study."
        )
    if any(v["more_seeds"] and v["verdict"] == "INCONCLUSIVE" for v in verdicts):
        notes.append("+k: about k more seeds give a word.")
    return notes


def remark_notes(verdicts: Sequence[Verdict]) -> list[str]:
    """Return each reason and remark once, with the comparisons that it concerns."""
    concerned: dict[str, list[str]] = {}
    for verdict in verdicts:
        word, reason = verdict["verdict"], verdict["reason"]
        # The word, or that of an A/A step that passed, says this.
        said = word == "INCONCLUSIVE" and (verdict["more_seeds"] or verdict["role"] == AA_ROLE)
        reasons = [f"{word}: {reason}"] if word and reason and not said else []
        excluded = [f"not counted: {each}" for each in verdict["excluded"]]
        for remark in (*reasons, *verdict["remarks"], *excluded):
            concerned.setdefault(remark, []).append(verdict["name"])
    total = len(verdicts)
    return [
        f"{remark} ({'all' if len(names) == total > 1 else ', '.join(names)})"
        for remark, names in concerned.items()
    ]


# The answer.

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


def summary(document: Document) -> str:
    rows, runs = document["rows"], document["runs"]
    seeds = len({run["seed"] for run in runs})
    done = sum(run["state"] == "done" for run in runs)
    return (
        f"{count(len(rows), 'variant')}, {count(seeds, 'seed')}, {done} of {len(runs)} runs "
        "finished and comparable"
    )


def answer(document: Document) -> str:
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


def best_verdict(document: Document) -> Document | None:
    """Return the verdict with the best word, and the lowest loss among equal words, if any."""
    words = ("BETTER", "EQUIVALENT", "INCONCLUSIVE", "WORSE")
    given = [v for v in _answering(document) if v["difference"] is not None]
    ranked = [
        (words.index(v["verdict"]), v["difference"], v) for v in given if v["verdict"] in words
    ]
    return min(ranked, key=lambda each: each[:2])[2] if ranked else None


def _answering(document: Document) -> list[Document]:
    """Return the comparisons that answer the study: with the baseline, if there are any."""
    every = document["verdicts"]
    roles = [verdict["role"] for verdict in every]
    role = "baseline" if "baseline" in roles else roles[0] if roles else ""
    return [verdict for verdict in every if verdict["role"] == role]


def _compared(document: Document, role: str) -> tuple[str, str]:
    if document["not_estimable"] is not None:
        return "effect", "0"
    if not any(row["parent"] for row in document["rows"]):
        return "combination", "the first one"
    return "step", "the baseline" if role == "baseline" else "its parent"


def _difference(verdict: Document, unit: str) -> str:
    text = f"{signed(verdict['difference'])} {unit}"
    if verdict["interval_95"]:
        low, high = map(signed, verdict["interval_95"])
        text += f" (95 % interval {low} to {high})"
    return text + ", which is rounding" * verdict["rounding_only"]


def _of_one(verdict: Document, unit: str) -> str:
    relation = _RELATIONS[verdict["verdict"]]
    subject = f"{verdict['step']} is {relation} {verdict['reference'] or '0'}"
    # A p of 1 that no test gave says nothing: the interval does.
    is_tested = verdict["p_of_word"] is not None and not is_own_test(verdict)
    p = f", p={format_p(verdict['p_of_word'])}".replace("=<", "<") * is_tested
    return f"{subject}: {_difference(verdict, unit)}, n={verdict['n']}{p}."


def notices(document: Document) -> list[str]:
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
    has_words = any(verdict["verdict"] for verdict in document["verdicts"])
    return texts + (seeds_notes(document) if has_words else []) + warnings(document)


def ranges(numbers: Sequence[int]) -> str:
    groups = groupby(enumerate(numbers), lambda each: each[1] - each[0])
    parts = [[number for _, number in group] for _, group in groups]
    return ", ".join(f"{p[0]}–{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
