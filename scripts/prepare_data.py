#!/usr/bin/env python3
"""Prepare the configured data set: download, tokenize, split, digest.

An existing data set is not prepared again. --json prints the folder of the data set and its digest. --verify prepares
nothing and checks every byte against the manifest. Exit codes: 3 the data set is missing, damaged or
cannot be prepared; 130 interrupted (the next call resumes a large data set).
"""

import _start

from gpt2.data.dataset import dataset_folder, open_dataset
from gpt2.data.prepare import prepare_dataset
from gpt2.memory.micro_batch import with_one_sequence
from gpt2.planning.arguments import add_json, add_settings, new_parser, settings_layers
from gpt2.study.plan import config_layers
from gpt2.study.resolve import resolve_config
from lib.config.tree import KconfigTree
from lib.console import log, run_main, show
from lib.report.render import json_document

SCHEMA_VERSION = 1


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_settings(parser)
    add_json(parser)
    parser.add_argument("--verify", action="store_true", help="check every byte")
    args = parser.parse()
    tree, layers = KconfigTree(), [*config_layers(args.build_dir), *settings_layers(args)]
    config = resolve_config(tree, with_one_sequence(tree, layers)).data
    if args.verify:
        folder = dataset_folder(config, args.build_dir)
        dataset = open_dataset(config, args.build_dir)
        log("DATA", f"{folder}: every byte verified, digest {dataset.digest}")
    else:
        folder = prepare_dataset(config, args.build_dir)
        log("DATA", f"{folder} is ready")
    if args.json:
        digest = open_dataset(config, args.build_dir).digest
        show(json_document(SCHEMA_VERSION, {"folder": str(folder), "digest": digest}))
    return 0


if __name__ == "__main__":
    run_main(main)
