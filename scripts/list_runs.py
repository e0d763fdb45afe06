#!/usr/bin/env python3
"""List, remove or archive the runs below OUTPUT_DIR, of all studies and configurations.

    list_runs.py                                             one line per run
    list_runs.py --where "N_LAYER=6 val_loss<2.5 state=done" only these
    list_runs.py clean --where "state=failed"                remove runs, after a yes
    list_runs.py archive --out study.tar.gz --where study=x  write runs to one file
    list_runs.py unpack --archive study.tar.gz               add the runs of such a file

Conditions compare a field (run, study, step, state, seed, iteration, val_loss, parameters, tokens,
train_seconds, finished, commit, hash) or a symbol with = != < <= > >=; * stands for any text. A run
that cannot be read is a line with the cause. Exit codes: 0 done, 1 a run was left out, 2 invalid
condition or archive, or not confirmed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import _start

from gpt2.ablation import OWN
from gpt2.ablation.resolve import resolve_config
from gpt2.planning.arguments import add_json, add_subcommands, add_variable, add_yes, new_parser
from gpt2.records import archive
from gpt2.records.listing import RunList, list_runs, select, to_json, to_text
from lib import console
from lib.config.dotconfig import ConfigWorkspace, read_constants
from lib.config.tree import KconfigTree
from lib.errors import EXIT_DONE, EXIT_FAILED, printable
from lib.make_variables import require_value
from lib.project import ROOT
from lib.report.render import json_document
from lib.units import format_size

COMMANDS = {
    "clean": "remove runs, after a confirmation",
    "archive": "write runs to one file",
    "unpack": "add the runs of an archive",
}
_WHERE = 'conditions, such as "N_LAYER=6 val_loss<2.5 state=done"'


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_variable(parser, "where", _WHERE)
    add_json(parser)
    commands = add_subcommands(parser, COMMANDS)
    for name in ("clean", "archive"):
        add_variable(commands[name], "where", _WHERE)
    add_yes(commands["clean"])
    add_variable(commands["archive"], "out", "new file, such as study.tar.gz")
    add_variable(commands["archive"], "weights", "1: include the final weights")
    add_variable(commands["unpack"], "archive", "file of make archive")
    for command in commands.values():
        add_json(command)
    args = parser.parse()
    place = ConfigWorkspace(ROOT, args.build_dir)
    # Runs can be listed without a configuration.
    values = (
        read_constants(place) if place.config.exists() else resolve_config(KconfigTree(), []).values
    )
    folder = args.build_dir / str(values["OUTPUT_DIR"])
    if args.command == "clean":
        return clean(args, folder)
    if args.command == "archive":
        listed = select(list_runs(folder), args.where)
        own = values.get("ABLATION_STUDY") == OWN
        study_file = args.build_dir / str(values["ABLATION_STUDY_FILE"]) if own else None
        return pack(args, listed, place.config, study_file)
    if args.command == "unpack":
        return unpack(args, folder, place.config)
    listed = select(list_runs(folder), args.where)
    text = to_text(listed, args.where, every_column=console.is_verbose())
    print(to_json(listed) if args.json else text, end="")
    return EXIT_DONE


def clean(args: argparse.Namespace, folder: Path) -> int:
    """Show the selected runs with their sizes, and remove them after a confirmation."""
    where = require_value(args.where, "WHERE", 'make clean-runs WHERE="state=failed"')
    listed = select(list_runs(folder, replaced=True), where)
    sizes = {run.run: archive.size_bytes(folder / run.run) for run in listed.runs}
    rows = [f"{format_size(sizes[run.run]):>12}  {run.state:11}  {run.run}" for run in listed.runs]
    total = f"{len(sizes)} run{'s' * (len(sizes) != 1)}, {format_size(sum(sizes.values()))}"
    print("\n".join(map(printable, [*rows, total])), file=sys.stderr if args.json else sys.stdout)
    reasons: Sequence[str] = []
    if listed.runs:
        console.confirm(f"remove {total} below {folder}?", args.yes)
        reasons = archive.remove_runs(listed.runs, folder)
    if args.json:
        document = {"runs": sizes, "kept": list(reasons)}
        print(json_document(archive.SCHEMA_VERSION, document), end="")
    return _left_out(reasons)


def pack(args: argparse.Namespace, listed: RunList, config: Path, study_file: Path | None) -> int:
    """Write an archive of the selected runs."""
    path = Path(require_value(args.out, "OUT", "make archive OUT=study.tar.gz"))
    weights = args.weights in ("1", "y")
    packed = archive.write_archive(
        listed, path, weights=weights, config=config, study_file=study_file
    )
    kind = "" if not packed.without else ", without weights (WEIGHTS=1 includes them)"
    size = f"{format_size(packed.bytes)}, compressed {format_size(path.stat().st_size)}"
    text = f"{path}: {len(packed.runs)} runs, {len(packed.files)} files, {size}{kind}"
    if args.json:
        document = {"file": str(path), "runs": packed.runs, "without": packed.without}
        text = json_document(archive.SCHEMA_VERSION, document).rstrip("\n")
    print(text)
    return _left_out(packed.skipped)


def unpack(args: argparse.Namespace, folder: Path, config: Path) -> int:
    """Add the runs of an archive, which are verified first."""
    path = Path(require_value(args.archive, "ARCHIVE", "make unpack ARCHIVE=study.tar.gz"))
    unpacked = archive.unpack(path, folder, config)
    if args.json:
        document = vars(unpacked) | {"config": unpacked.config and str(unpacked.config)}
        print(json_document(archive.SCHEMA_VERSION, document), end="")
    else:
        print(f"{len(unpacked.new)} runs added below {folder}, {len(unpacked.same)} were there")
        if unpacked.config and unpacked.config != config:
            print(f"to use its configuration: make KCONFIG_CONFIG={unpacked.config} report")
    return _left_out([f"{run}: another run has this name here" for run in unpacked.different])


def _left_out(reasons: Sequence[str]) -> int:
    for reason in reasons:
        console.log("WARN", f"left out: {reason}")
    return EXIT_FAILED if reasons else EXIT_DONE


if __name__ == "__main__":
    console.run_main(main)
