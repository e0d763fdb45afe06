"""Verdicts as text: the table of a study's comparisons, and one line per comparison."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from textwrap import wrap

from lib.errors import EXIT_DONE, EXIT_FAILED, EXIT_INCONCLUSIVE, EXIT_NOT_COMPARABLE
from lib.report.contrast_tests import INTERVAL_ERROR, SPREAD_VARIANCES, mean_of
from lib.report.contrasts import AA_ROLE
from lib.report.render import markdown_table
from lib.report.study_verdicts import StudyVerdicts, aa_word, is_failed
from lib.report.verdicts import UNSTABLE_REMARK, ContrastVerdict, VerdictWord
from lib.tracking.tracker import TrackerTable
from lib.units import format_difference, format_interval

_SMALLEST_SHOWN_P = 1e-12
# With fewer other comparisons, a mean variance says little.
_MIN_OTHERS = 3
# Columns of a terminal, and the indentation of a continued line.
LINE_WIDTH = 80
_INDENT = " " * 8
_MAX_STUDIES_NAMED = 3


def seeds_note(study: StudyVerdicts) -> str:
    """Return why comparisons have no verdict: too few seeds, or no look; "" if all have one."""
    least = study.plan.rule.min_seeds
    waiting = [v for v in study.verdicts if not v.is_given]
    between = sorted({v.reason for v in waiting if v.n >= least})
    if between:
        count = sum(v.n >= least for v in waiting)
        return f"{count} comparison{'s' * (count > 1)} without a word: {', '.join(between)}.\n"
    counts = sorted({v.n for v in waiting if v.n})
    if not counts:
        return ""
    shown = ", ".join(f"n={n}" for n in counts)
    seeds = ",".join(str(seed) for seed in range(1, least + 1))
    return (
        f"{shown}: a verdict needs at least {least} seeds; SEEDS={seeds} trains every step with "
        f"{least}.\n"
    )


def verdicts_text(study: StudyVerdicts, numbers: Mapping[str, int | None]) -> str:
    """Return the section of the verdicts; "" if there is none.

    ``numbers`` maps steps to their numbers, which name the references if all steps have one.
    """
    given = [verdict for verdict in study.verdicts if verdict.is_given]
    effects = "".join(f"- {line}\n" for line in design_note(study).splitlines())
    effects = effects and f"\n{effects}"
    if not given:
        return effects
    names = {name: str(number) for name, number in numbers.items() if number is not None}
    if len(set(names.values())) < len(names):
        names = {}
    header = ["step", "against", "Δ ± 95 %", "n", "p", "verdict"]
    rows = [
        [
            verdict.contrast.step,
            names.get(verdict.contrast.reference, verdict.contrast.reference),
            *verdict_cells(verdict),
        ]
        for verdict in given
    ]
    grid = markdown_table(header, rows, left=(0, 1, 5))
    return f"\n## Verdicts\n\n{grid}\n{rule_note(study)}{effects}{_remarks(given)}"


def verdict_notes(study: StudyVerdicts) -> str:
    """Return the rule, its limits, and remarks on single comparisons; "" without words.

    Remarks on unstable runs are omitted: the table has them in the column "state".
    """
    given = [_without_instability(verdict) for verdict in study.verdicts if verdict.is_given]
    return f"{rule_note(study)}{design_note(study)}{_remarks(given).lstrip()}" if given else ""


def _without_instability(verdict: ContrastVerdict) -> ContrastVerdict:
    remarks = [r for r in verdict.remarks if not r.startswith(UNSTABLE_REMARK)]
    return replace(verdict, remarks=tuple(remarks))


def verdict_cells(verdict: ContrastVerdict) -> list[str]:
    """Return difference with half of its 95 % interval, number of seeds, p and word."""
    count = str(verdict.n) if verdict.n else "-"
    return [_difference(verdict), count, format_p(verdict.p_of_word), verdict_word(verdict)]


def verdict_lines(study: StudyVerdicts) -> str:
    """Return one line per comparison, with its remarks, and one per noisy comparison and drift."""
    lines = [verdict_line(verdict) for verdict in (*study.verdicts, *study.aa_steps)]
    notes = design_note(study) + noise_note(study) + repeat_note(study) + drift_note(study)
    return "".join(f"{line}\n" for line in lines) + notes


_TRACKED = ("comparison", "verdict", "difference", "low", "high", "n", "p", "of", "remarks")


def verdict_table(study: StudyVerdicts) -> TrackerTable:
    """Return the comparisons with a word, and the A/A steps, as values for trackers."""
    rows: list[Sequence[str | int | float | None]] = []
    for verdict in (*study.verdicts, *study.aa_steps):
        if verdict.is_given:
            low, high = verdict.test.interval if verdict.test else (None, None)
            name, word = verdict.contrast.name, verdict_word(verdict)
            p, remarks = verdict.p_of_word, "; ".join(all_remarks(verdict))
            figures = (verdict.difference, low, high, verdict.n, p, verdict.planned)
            rows.append((name, word, *figures, remarks))
    return TrackerTable(_TRACKED, rows)


def all_remarks(verdict: ContrastVerdict) -> list[str]:
    """Return the reason of the word, if it has one, and the remarks.

    An A/A step needs no reason why it has passed, such as the seeds that would show a difference.
    """
    passed = verdict.contrast.role == AA_ROLE and verdict.word is VerdictWord.INCONCLUSIVE
    return [*([verdict.reason] if verdict.reason and not passed else []), *verdict.remarks]


def design_note(study: StudyVerdicts) -> str:
    """Return a line for each effect that is not estimable, and one on inflated variances."""
    effects = study.effects
    if effects is None:
        return ""
    note = "".join(
        f"EFFECT  {name}: not estimable, because {reason}\n"
        for name, reason in effects.not_estimable.items()
    )
    by_factor: dict[str, list[str]] = {}
    for name, factor in effects.inflated.items():
        by_factor.setdefault(f"{factor:.2f}", []).append(name)
    for growth, names in by_factor.items():
        note += f"EFFECT  variance x {growth} because of missing cells: {', '.join(names)}\n"
    return note


def _aa_note(verdict: ContrastVerdict) -> str:
    """Return a line on an A/A step."""
    shown = ""
    if verdict.test is not None and verdict.difference is not None:
        shown = f" {format_difference(verdict.difference)} {format_interval(verdict.test.interval)}"
    return f"{aa_word(verdict)}: {verdict.contrast.step}{shown}, tested alone.\n"


def repeat_note(study: StudyVerdicts) -> str:
    """Return a line on each configuration that was trained twice: the noise of one seed."""
    note = ""
    for name, differences in study.repeats.items():
        if differences:
            largest = max(map(abs, differences.values()))
            result = f"differs by up to {largest:.1e} nats" if largest else "is equal"
            count = len(differences)
            note += f"REPEAT {name} {result} ({count} seed{'s' * (count > 1)}).\n"
    return note


def drift_note(study: StudyVerdicts) -> str:
    """Return a line if the losses drifted over the study, and one per device whose speed did."""
    note = ""
    if study.drift is not None and study.drift.alarms:
        p = p_equation(study.drift.p)
        change = format_difference(study.drift.trend)
        note = f"DRIFT {p}: {change} nats from the first to the last run.\n"
    for device, test in study.speed_drifts.items():
        if test.alarms:
            change = f"{math.expm1(test.trend):+.0%} tokens/s"
            note += (
                f"DRIFT {p_equation(test.p)}: {change} from the first to the last run ({device}).\n"
            )
    return note


def verdicts_exit_code(study: StudyVerdicts, *, strict: bool = False) -> int:
    """Return 4 if a verdict is UNFAIR or an A/A step failed, 1 if a step diverged, 5 if ``strict``
    and one is INCONCLUSIVE, else 0.
    """
    words = {verdict.word for verdict in study.verdicts}
    aa_words = {verdict.word for verdict in study.aa_steps}
    if study.aa_failed or VerdictWord.UNFAIR in words | aa_words:
        return EXIT_NOT_COMPARABLE
    if VerdictWord.DIVERGED in words | aa_words:
        return EXIT_FAILED
    return EXIT_INCONCLUSIVE if strict and VerdictWord.INCONCLUSIVE in words else EXIT_DONE


def p_equation(p: float | None) -> str:
    """Return p with its sign of comparison: ``p=0.012`` or ``p<1e-12``."""
    return f"p={format_p(p)}".replace("=<", "<")


def format_p(p: float | None) -> str:
    """Return p with two digits; "-" if there is none."""
    if p is None:
        return "-"
    return f"<{_SMALLEST_SHOWN_P:g}" if p < _SMALLEST_SHOWN_P else f"{p:.2g}"


def verdict_line(verdict: ContrastVerdict, width: int = LINE_WIDTH) -> str:
    """Return the verdict as one line; parts that exceed ``width`` columns are on indented lines."""
    first, *parts = _parts(verdict)
    lines = [first]
    for part in parts:
        if len(lines[-1]) + len(part) + 2 <= width:
            lines[-1] += f"  {part}"
        else:
            lines += wrap(part, width, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return "\n".join(lines)


def _parts(verdict: ContrastVerdict) -> list[str]:
    """Return the parts of a verdict's line: name, difference and interval; word; details; remarks."""
    contrast = verdict.contrast
    head = f"VERDICT {contrast.name}"
    detail = [verdict.reason] if verdict.reason else []
    if not verdict.is_given:
        shown = "" if verdict.difference is None else f"{format_difference(verdict.difference)}  "
        return [head, f"{shown}none: {verdict.reason}"]
    if verdict.test is not None and verdict.difference is not None:
        interval = format_interval(verdict.test.interval)
        head += f"  {format_difference(verdict.difference)} {interval}"
        look = f", look {verdict.look}" * (verdict.look is not None)
        p = f"{p_equation(verdict.p_of_word)} (of {verdict.planned}{look})"
        detail = [f"n={verdict.n} {p}", *detail]
    word = verdict.word.value
    if contrast.role == AA_ROLE:
        word, detail = aa_word(verdict), detail[:1]
    return [head, word, *detail, *verdict.remarks]


def _difference(verdict: ContrastVerdict) -> str:
    if verdict.difference is None:
        return "-"
    if verdict.test is None:
        return format_difference(verdict.difference)
    low, high = verdict.test.interval
    return f"{format_difference(verdict.difference)} ± {(high - low) / 2:.4f}"


def verdict_word(verdict: ContrastVerdict) -> str:
    """Return the word with k/n of a diverged step, or +k further seeds of an open comparison."""
    if not verdict.is_given:
        return "-"
    if verdict.contrast.role == AA_ROLE:
        return aa_word(verdict)
    if verdict.word is VerdictWord.DIVERGED:
        share = verdict.reason.partition(" ")[0]
        return f"{verdict.word} {share}" if "/" in share else verdict.word.value
    if verdict.word is VerdictWord.INCONCLUSIVE and verdict.more_seeds:
        return f"{verdict.word} +{verdict.more_seeds}"
    return verdict.word.value


def verdict_colour(verdict: ContrastVerdict) -> str:
    """Return the name of the colour of a verdict: the word in lower case, or muted without a word.

    An A/A step has a colour only if it failed.
    """
    if verdict.contrast.role == AA_ROLE:
        return "worse" if is_failed(verdict) else "muted"
    return verdict.word.lower() if verdict.is_given else "muted"


def noise_note(study: StudyVerdicts) -> str:
    """Return a line for each comparison whose variance hides the others under the rule shared."""
    if study.plan.rule.variance != "shared":
        return ""
    deviations = {
        v.contrast.name: v.sd / math.sqrt(v.contrast.scale)
        for v in study.verdicts
        if v.test and v.sd
    }
    note = ""
    for name, deviation in deviations.items():
        # Squares of ratios, which cannot overflow.
        others = [(sd / deviation) ** 2 for other, sd in deviations.items() if other != name]
        if len(others) >= _MIN_OTHERS and mean_of(others) < 1 / SPREAD_VARIANCES:
            factor = 1 / math.sqrt(mean_of(others))
            note += (
                f"NOISE {name}: {factor:.0f} times the deviation of the others,\n"
                "      whose effects it hides, because the rule shared uses the mean variance.\n"
            )
    return note


def rule_note(study: StudyVerdicts) -> str:
    """Return a note on the columns of the verdicts, the rule, looks, pairing and drift."""
    rule, plan = study.plan.rule, study.plan
    band = f"±{rule.band:g}" if rule.band else "none declared (VERDICT_BAND)"
    schedule = study.plan.schedule
    looks = [f"{look.n}" for look in schedule.taken] if schedule else []
    note = (
        "Δ: mean over seeds ± half of its 95 % interval, nats per token. p: corrected\n"
        f"for all {study.planned} comparisons, at most {rule.alpha:g} for a word. "
        f"Rule: {rule.variance};\nband: {band}.\n"
    )
    if schedule and looks:
        spent = schedule.spent(rule.alpha)
        note += f"Looks at {', '.join(looks)} seeds spent {spent:.3g} of {rule.alpha:g}.\n"
        if any(look.is_at_added for look in schedule.taken):
            note += "Comparisons added after a look are corrected for each other.\n"
    if study.pairing is not None:
        change = "removed" if study.pairing >= 0 else "added"
        note += f"Pairing by seed {change} {abs(study.pairing):.0%} of the variance.\n"
    note += _stability_note(study) + _selection_note(study)
    note += "".join(_aa_note(verdict) for verdict in study.aa_steps if verdict.is_given)
    note += noise_note(study) + repeat_note(study) + drift_note(study)
    if any(v.more_seeds and v.word is VerdictWord.INCONCLUSIVE for v in study.verdicts):
        note += "+k: about k more seeds give a word.\n"
    return note + (f"Compared: {plan.against}.\n" if plan.against != "both" else "")


def _stability_note(study: StudyVerdicts) -> str:
    """Return the limit of the rate of divergences that runs without one leave open.

    With probability 0.95, the rate is at most 1 - 0.05^(1/n) if none of n runs diverged.
    """
    tested = [verdict for verdict in study.verdicts if verdict.test]
    if not tested or any(v.word is VerdictWord.DIVERGED for v in study.verdicts):
        return ""
    n = min(verdict.n for verdict in tested)
    rate = 1 - INTERVAL_ERROR ** (1 / n)
    return f"Diverged: 0 of {n} seeds of each step; its true rate may still be {rate:.0%}.\n"


def _selection_note(study: StudyVerdicts) -> str:
    """Return how many other studies have verdicts on the same documents; "" if none.

    The probability of a false word holds for each study; the best of many is still selected.
    """
    others = study.on_same_documents
    if not others:
        return ""
    names = ", ".join(others[:_MAX_STUDIES_NAMED])
    more = len(others) - _MAX_STUDIES_NAMED
    names += f" and {more} more" * (more > 0)
    several = len(others) > 1
    text = (
        f"{len(others)} other stud{'ies have' if several else 'y has'} verdicts on these evaluation "
        f"documents ({names}): the error of {study.plan.rule.alpha:g} is per study."
    )
    return "".join(f"{line}\n" for line in wrap(text, LINE_WIDTH))


def _remarks(verdicts: list[ContrastVerdict]) -> str:
    """Return each reason and remark once, with the comparisons that it concerns."""
    concerned: dict[str, list[str]] = {}
    for verdict in verdicts:
        counted = verdict.word is VerdictWord.INCONCLUSIVE and verdict.more_seeds
        reasons = [f"{verdict.word}: {verdict.reason}"] if verdict.reason and not counted else []
        for remark in (*reasons, *verdict.remarks):
            concerned.setdefault(remark, []).append(verdict.contrast.name)
    total = len(verdicts)
    lines = [
        f"- {remark} ({'all' if len(names) == total > 1 else ', '.join(names)})\n"
        for remark, names in concerned.items()
    ]
    return "\n" + "".join(lines) if lines else ""
