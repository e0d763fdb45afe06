#!/usr/bin/env python3
"""Train the runs of .config: kablate all, make."""

import _start

from lib.kablate import run

if __name__ == "__main__":
    run("all")
