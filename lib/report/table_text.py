"""Texts of the report page: losses, and the marginal means of a factorial design."""

from collections.abc import Sequence

from lib.plan.designs import ON
from lib.report.contrasts import EFFECT
from lib.report.study_verdicts import StudyVerdicts
from lib.report.table import MarginalEffect, SampleStats
from lib.report.verdict_text import verdict_cells

EFFECTS_NOTE = (
    "val loss: mean over the cells of the level. Δ: main effect, the loss with the\n"
    "feature minus the loss without it, over all settings of the others.\n"
)


def effect_rows(
    effects: Sequence[MarginalEffect], study: StudyVerdicts
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the marginal means of a factorial design, with its verdicts."""
    header = ["factor", "level", "cells", "val loss", "Δ ± 95 %", "verdict"]
    verdicts = {
        v.contrast.step.rpartition(" ")[2]: v for v in study.verdicts if v.contrast.role == EFFECT
    }
    lines = []
    for effect in effects:
        cells = ["", ""]
        if effect.level == ON:
            verdict = verdicts.get(effect.factor)
            cells = verdict_cells(verdict)[::3] if verdict else ["", "not estimable"]
        mean = f"{effect.val_loss:.4f}"
        lines.append([effect.factor, effect.level, str(effect.cells), mean, *cells])
    return header, lines


def format_loss(stat: SampleStats | None) -> str:
    """Return mean, standard deviation and number of losses; "-" if there is none."""
    if stat is None:
        return "-"
    return f"{stat.mean:.4f}" + (f" ± {stat.sd:.4f} n={stat.n}" if stat.sd is not None else "")
