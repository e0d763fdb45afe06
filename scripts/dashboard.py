#!/usr/bin/env python3
"""Serve the TensorBoard or trackio dashboard of .config's runs on localhost.

dashboard.py tensorboard            http://127.0.0.1:6006
dashboard.py trackio --port 8000    http://127.0.0.1:8000
"""

import _start

from gpt2.arguments import asked_plan, add_selection, new_parser
from lib import cli
from lib.tracking.dashboards import PORTS, serve


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    parser.add_argument("name", choices=PORTS)
    parser.add_argument("--port", type=int, help="default: the dashboard's standard port")
    args = parser.parse_args()
    _, plan = asked_plan(args)
    serve(args.name, plan.folder, args.port or PORTS[args.name])


if __name__ == "__main__":
    cli.run(main)
