#!/usr/bin/env python3
"""Prepare the configured data set: download, tokenize, split, digest.

It is made once: a data set that is there is left alone. Prints its folder. --verify makes nothing
and checks every byte against the manifest. Exit 3 when it cannot be made, is missing or damaged;
130 when interrupted, and the next call goes on with a large one.
"""

import argparse
from pathlib import Path

import _start

from gpt2.config import load_config
from gpt2.data.prepare import prepare
from gpt2.data.source import dataset_folder
from gpt2.data.store import open_dataset
from lib.cli import run
from lib.console import say


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-O", "--build-dir", metavar="DIR", type=Path, default=Path("."))
    parser.add_argument("--verify", action="store_true", help="check every byte")
    arguments = parser.parse_args()
    config = load_config(arguments.build_dir).data
    if arguments.verify:
        dataset = open_dataset(config, arguments.build_dir)
        folder = dataset_folder(config, arguments.build_dir)
        say("DATA", f"{folder}: every byte as it was made, digest {dataset.digest}")
    else:
        folder = prepare(config, arguments.build_dir)
        say("DATA", f"{folder} is there")
    print(folder)
    return 0


if __name__ == "__main__":
    run(main)
