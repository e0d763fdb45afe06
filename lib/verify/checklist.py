"""The checklist of one comparison: rows, verdict and output formats."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from lib.console import say
from lib.errors import EXIT_DONE, EXIT_NOT_COMPARABLE
from lib.files import indented_json
from lib.verify.rows import Row, Verdict

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Checklist:
    """Rows for ``runs``; ``publish`` maps name → text and is shown only if all rows pass."""

    source: str
    runs: Sequence[str]
    rows: Sequence[Row]
    publish: Mapping[str, str]

    @property
    def failing(self) -> list[Row]:
        """Return the rows that do not pass."""
        return [row for row in self.rows if row.verdict is not Verdict.PASS]

    @property
    def exit_code(self) -> int:
        """Return 0 if every row passes; 4 if a row fails or is unknown."""
        return EXIT_NOT_COMPARABLE if self.failing else EXIT_DONE


def to_markdown(checklist: Checklist) -> str:
    """Return the rows as a Markdown table; if all rows pass, also the texts to publish."""
    title = f"# Verification of {len(checklist.runs)} run(s), tracker: {checklist.source}"
    lines = [title, "", "| check | verdict | what |", "|---|---|---|"]
    lines += [f"| {r.check} | {r.verdict} | {_cell(r.what)} |" for r in checklist.rows]
    lines.append("")
    if checklist.failing:
        lines.append(
            f"Not publishable: {len(checklist.failing)} of {len(checklist.rows)} rows do not pass."
        )
    else:
        lines += ["## Publish with the results", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {_cell(text)} |" for name, text in checklist.publish.items()]
    return "\n".join(lines) + "\n"


def to_json(checklist: Checklist) -> str:
    """Return the checklist as one JSON document."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "source": checklist.source,
        "runs": list(checklist.runs),
        "rows": [asdict(row) for row in checklist.rows],
        "publish": None if checklist.failing else dict(checklist.publish),
        "exit_code": checklist.exit_code,
    }
    return indented_json(document)


def say_failing(checklist: Checklist) -> None:
    """Log the reasons of rows that do not pass on stderr, with the rows' names and a command to
    run.
    """
    rows: dict[tuple[Verdict, str], list[Row]] = {}
    for row in checklist.failing:
        rows.setdefault((row.verdict, row.what), []).append(row)
    for (verdict, what), same_reason in rows.items():
        tag = "REFUSE" if verdict is Verdict.FAIL else "UNKNOWN"
        names = ", ".join(row.check for row in same_reason)
        advice = next((row.next for row in same_reason if row.next), "")
        say(tag, f"{names}: {what}" + (f"\n        {advice}" if advice else ""))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
