#!/usr/bin/env python3
"""Check whether this machine can train the runs of .config: kablate preflight, make preflight."""

import sys

import _start

from lib.kablate import main

if __name__ == "__main__":
    main("preflight", *sys.argv[1:])
