#!/usr/bin/env python3
"""Serve the page of TensorBoard or trackio for the runs of .config, to this machine alone.

dashboard.py tensorboard            http://127.0.0.1:6006
dashboard.py trackio --port 8000    http://127.0.0.1:8000
"""

import _start

from gpt2.arguments import asked_plan, add_selection, new_parser
from lib import cli
from lib.tracking.dashboards import PORTS, serve


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    parser.add_argument("name", choices=PORTS)
    parser.add_argument("--port", type=int, help="instead of the program's own")
    given = parser.parse_args()
    _, plan = asked_plan(given)
    serve(given.name, plan.folder, given.port or PORTS[given.name])


if __name__ == "__main__":
    cli.run(main)
