#!/usr/bin/env python3
"""Serve TensorBoard for .config's runs on localhost.

dashboard.py                http://127.0.0.1:6006
dashboard.py --port 8000    http://127.0.0.1:8000
"""

import _start

from gpt2.planning.arguments import add_selection, asked_plan, new_parser
from lib import console
from lib.tracking.dashboards import serve_tensorboard


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    parser.add_argument("--port", type=int, default=6006)
    args = parser.parse()
    _, plan = asked_plan(args)
    serve_tensorboard(plan.folder, args.port)


if __name__ == "__main__":
    console.run_main(main)
