#!/usr/bin/env python3
"""Serve the TensorBoard or trackio dashboard of .config's runs on localhost.

dashboard.py tensorboard            http://127.0.0.1:6006
dashboard.py trackio --port 8000    http://127.0.0.1:8000
"""

import _start

from gpt2.planning.arguments import add_selection, asked_plan, new_parser
from lib import console
from lib.tracking.dashboards import DASHBOARD_PORTS, serve_dashboard


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    parser.add_argument("name", choices=DASHBOARD_PORTS)
    parser.add_argument("--port", type=int, help="default: the dashboard's standard port")
    args = parser.parse()
    _, plan = asked_plan(args)
    serve_dashboard(args.name, plan.folder, args.port or DASHBOARD_PORTS[args.name])


if __name__ == "__main__":
    console.run_main(main)
