#!/usr/bin/env python3
"""Write the hardware record of this machine: hw.json, and the output of nvidia-smi.

Both files go to the folder "environment" of the build folder, where every training command keeps
them up to date; hw.json also goes to stdout. On a machine with AMD GPUs, rocm_smi.txt is written as
well; without nvidia-smi, nvidia_smi.txt contains a note. Exit code 3: the folder is not writable.
"""

from argparse import RawDescriptionHelpFormatter
from pathlib import Path

import _start

from lib import console
from lib.env.snapshot import FOLDER
from lib.files import pretty_json


def main() -> int:
    """Run the command line."""
    parser = console.CommandLine(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("-O", "--build-dir", type=Path, default=Path(), help="the build folder")
    args = parser.parse_args()
    import torch

    from lib.env.hardware import probe_hardware

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hardware = probe_hardware(args.build_dir / FOLDER, device)
    console.show(pretty_json(hardware))
    return 0


if __name__ == "__main__":
    console.run_main(main)
