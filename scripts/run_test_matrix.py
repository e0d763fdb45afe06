#!/usr/bin/env python3
"""Train the runs of .config: kablate all, make."""

import sys

import _start

from lib.kablate import main

if __name__ == "__main__":
    main("all", *sys.argv[1:])
