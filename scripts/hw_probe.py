#!/usr/bin/env python3
"""Write what this machine is: hw.json, and the GPU's own program's words in nvidia_smi.txt.

Both go into the folder environment of the build folder, where every training command keeps them up
to date; hw.json goes to stdout too. On a machine with AMD GPUs there is rocm_smi.txt as well; where
there is no nvidia-smi, nvidia_smi.txt says so. Exit code 3 when the folder cannot be written to.
"""

import json

import _start

from gpt2.arguments import new_parser
from lib import cli
from lib.environment.snapshot import FOLDER


def main() -> int:
    """The command line."""
    given = new_parser(__doc__).parse_args()
    import torch

    from lib.environment.hardware import probe_hardware

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = probe_hardware(given.build_dir / FOLDER, device)
    print(json.dumps(found, sort_keys=True, indent=2, allow_nan=False))
    return 0


if __name__ == "__main__":
    cli.run(main)
