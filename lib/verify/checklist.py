"""All rows of one comparison, its verdict, and how both are told."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from lib.console import say
from lib.errors import EXIT_DONE, EXIT_NOT_COMPARABLE
from lib.files import indented_json
from lib.verify.rows import Row, Verdict

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Checklist:
    """What was found of ``runs``, and what to publish: name → text, shown only if all rows pass."""

    source: str
    runs: Sequence[str]
    rows: Sequence[Row]
    publish: Mapping[str, str]

    @property
    def failing(self) -> list[Row]:
        """The rows that do not pass."""
        return [row for row in self.rows if row.verdict is not Verdict.PASS]

    @property
    def exit_code(self) -> int:
        """0 where every row passes; 4 for a confound, and for what is not known."""
        return EXIT_NOT_COMPARABLE if self.failing else EXIT_DONE


def to_markdown(found: Checklist) -> str:
    """The rows as a table, and, where all pass, what to publish as another."""
    title = f"# Verification of {len(found.runs)} run(s), tracker: {found.source}"
    lines = [title, "", "| check | verdict | what |", "|---|---|---|"]
    lines += [f"| {r.check} | {r.verdict} | {_cell(r.what)} |" for r in found.rows]
    lines.append("")
    if found.failing:
        lines.append(f"Not to be published: {len(found.failing)} of {len(found.rows)} rows fail.")
    else:
        lines += ["## To publish with the results", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {_cell(text)} |" for name, text in found.publish.items()]
    return "\n".join(lines) + "\n"


def to_json(found: Checklist) -> str:
    """The same as one document."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "source": found.source,
        "runs": list(found.runs),
        "rows": [asdict(row) for row in found.rows],
        "publish": None if found.failing else dict(found.publish),
        "exit_code": found.exit_code,
    }
    return indented_json(document)


def say_failing(found: Checklist) -> None:
    """A line on stderr for each reason that rows do not pass, with their names, and what to type."""
    rows: dict[tuple[Verdict, str], list[Row]] = {}
    for row in found.failing:
        rows.setdefault((row.verdict, row.what), []).append(row)
    for (verdict, what), alike in rows.items():
        tag = "REFUSE" if verdict is Verdict.FAIL else "UNKNOWN"
        names = ", ".join(row.check for row in alike)
        advice = next((row.next for row in alike if row.next), "")
        say(tag, f"{names}: {what}" + (f"\n        {advice}" if advice else ""))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
