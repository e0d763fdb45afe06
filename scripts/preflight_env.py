#!/usr/bin/env python3
"""Check whether this machine can train the runs of .config: kablate preflight, make preflight."""

import _start

from lib.kablate import run

if __name__ == "__main__":
    run("preflight")
