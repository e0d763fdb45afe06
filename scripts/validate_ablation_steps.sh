#!/bin/sh
# Check every step of the RATIO study with make check, independently of .config.
#
#   scripts/validate_ablation_steps.sh                all steps
#   scripts/validate_ablation_steps.sh STEPS=0-3,ra   arguments are passed to make
exec make -C "$(dirname "$0")/.." check DEFCONFIG=gpt2-ratio-ablation "$@"
