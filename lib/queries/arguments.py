"""Command-line arguments shared by all queries."""

import argparse
import os
from pathlib import Path

from lib.queries.contract import RunName, Source, find

SOURCES = ("wandb", "offline", "trackio", "local")


def query_parser(text: str) -> argparse.ArgumentParser:
    """Return a parser with ``--source`` and the arguments that select a run.

    ``text`` is the description in the help.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--entity", default="", help="W&B user or team (default: the account's default entity)"
    )
    parser.add_argument(
        "--project", default="", help="project name in the tracker: kablate-<study>"
    )
    parser.add_argument(
        "--source",
        choices=SOURCES,
        default="wandb",
        help="W&B server, W&B offline files, trackio store, or run directories",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder of the last three sources (default: results; for trackio TRACKIO_DIR if set)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document to stdout")
    return parser


def open_source(args: argparse.Namespace, results: Path = Path("results")) -> Source:
    """Return the selected source; without ``--folder``, files are searched below ``results``."""
    folder = args.folder or results
    if args.source == "wandb":
        from lib.queries.cloud import CloudSource

        return CloudSource(args.entity)
    if args.source == "offline":
        from lib.queries.offline import OfflineSource

        return OfflineSource(folder)
    if args.source == "trackio":
        from lib.queries.trackio import TrackioSource

        # The folder that the tracker wrote to.
        env_folder = os.environ.get("TRACKIO_DIR")
        return TrackioSource(Path(env_folder) if env_folder and not args.folder else folder)
    from lib.queries.local import LocalSource

    return LocalSource(folder)


def asked_run(args: argparse.Namespace) -> tuple[Source, RunName]:
    """Return the source and the run of ``--run-name``. Raises ConfigError unless exactly one
    matches.
    """
    source = open_source(args)
    return source, find(source, args.project, args.run_name)
