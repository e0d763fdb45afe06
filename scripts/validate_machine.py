#!/usr/bin/env python3
"""Validate native sparse attention on this device before training with it.

    validate_machine.py           a few seconds
    validate_machine.py --full    with 8192 tokens on a CPU, 65,536 on a GPU
    validate_machine.py --device cpu

For every backend of the selected branch: values and gradients against the float64 reference,
causality, decoding against the full forward pass, bfloat16 and float16, and a long context. Reports
PASS, FAIL, or ABSENT with the reason if the device does not support it. Exit codes: 0 no failure, 1 a failure, 2 usage.
"""

import dataclasses
import json
import sys

import _start
import torch

from gpt2.nsa.validate import to_markdown, validate_device
from gpt2.planning.arguments import add_full, add_json, new_parser
from lib import console
from lib.console import log
from lib.env.observe import device_name
from lib.errors import EXIT_DONE, EXIT_FAILED


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_json(parser)
    add_full(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if available")
    args = parser.parse()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    log("CHECK", f"{device_name(device)}, torch {torch.__version__}")
    rows = validate_device(device, args.full)
    if args.json:
        records = [dataclasses.asdict(row) for row in rows]
        document = {"schema_version": 1, "device": device_name(device), "rows": records}
        console.show(json.dumps(document, sort_keys=True, allow_nan=False) + "\n")
    else:
        console.show(to_markdown(rows))
    return EXIT_FAILED if any(row.state == "FAIL" for row in rows) else EXIT_DONE


if __name__ == "__main__":
    console.run_main(main)
