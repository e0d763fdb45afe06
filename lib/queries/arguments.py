"""What every query asks of the command line."""

import argparse
import os
from pathlib import Path

from lib.queries.contract import RunName, Source, find

SOURCES = ("wandb", "offline", "trackio", "local")


def query_parser(text: str) -> argparse.ArgumentParser:
    """A parser with ``--source`` and all that says which run is meant; ``text`` is the help."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--entity", default="", help="W&B user or team; the account's own if absent"
    )
    parser.add_argument("--project", default="", help="as trackers know it: kablate-<study>")
    parser.add_argument(
        "--source",
        choices=SOURCES,
        default="wandb",
        help="a W&B server, its offline files, trackio's store, or the run directories",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the last three are (results, or for trackio TRACKIO_DIR where that is set)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


def open_source(given: argparse.Namespace, results: Path = Path("results")) -> Source:
    """The source that was asked for; files are looked for below ``results`` if nobody says where."""
    folder = given.folder or results
    if given.source == "wandb":
        from lib.queries.cloud import CloudSource

        return CloudSource(given.entity)
    if given.source == "offline":
        from lib.queries.offline import OfflineSource

        return OfflineSource(folder)
    if given.source == "trackio":
        from lib.queries.trackio import TrackioSource

        # Where the tracker itself wrote.
        own = os.environ.get("TRACKIO_DIR")
        return TrackioSource(Path(own) if own and not given.folder else folder)
    from lib.queries.local import LocalSource

    return LocalSource(folder)


def asked_run(given: argparse.Namespace) -> tuple[Source, RunName]:
    """The source and the run that ``--run-name`` means. ConfigError where it is not one."""
    source = open_source(given)
    return source, find(source, given.project, given.run_name)
