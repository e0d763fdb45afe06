#!/bin/sh
# Check every step of the RATIO study: make check, whatever .config says.
#
#   scripts/validate_ablation_steps.sh                all steps
#   scripts/validate_ablation_steps.sh STEPS=0-3,ra   what follows is handed to make
exec make -C "$(dirname "$0")/.." check DEFCONFIG=gpt2-ratio-ablation "$@"
