#!/usr/bin/env python3
"""Train one step of the RATIO study.

    gpt2/train_ra_mla.py --ra-mla-ablation-step 7
    gpt2/train_ra_mla.py --ra-mla-ablation-step mla-golden --optimizer adamw --dataset shakespeare
    gpt2/train_ra_mla.py --ra-mla-ablation-step 7 --dry-run

The step is applied on top of .config, or of defconfigs/gpt2-ratio-ablation if there is no .config.
Flags are equivalent to SET: --optimizer adamw sets OPTIMIZER_ADAMW=y. .config is not modified. Run
directory and exit codes are the same as for make.
"""

import sys

import _start

from gpt2.check.cases import plan_cases
from gpt2.check.command import CheckRequest, check_and_report
from gpt2.planning.arguments import add_running, new_parser, run_options
from gpt2.planning.plan import make_plan, step_layers, table_plan
from gpt2.running import launch
from lib import console
from lib.config.layers import parse_command_line_settings

_CHOICES = ("optimizer", "dataset", "tokenizer", "pruning", "device", "precision")
_NUMBERS = ("max-iters", "batch-size", "grad-accumulation", "global-batch", "block-size", "seed")


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "--ra-mla-ablation-step", required=True, metavar="N", help="number or slug of the step"
    )
    for name in _CHOICES:
        parser.add_argument(f"--{name}", metavar="NAME", help=f"{_symbol(name)}_NAME=y")
    for name in _NUMBERS:
        parser.add_argument(f"--{name}", metavar="N", help=f"{_symbol(name)}=N")
    parser.add_argument("--set", default="", metavar='"A=1 B=y"', help="any other setting")
    parser.add_argument("--dry-run", action="store_true", help="check the step, as make check does")
    add_running(parser)
    args = parser.parse()
    values = vars(args)
    words = [
        f"{_symbol(name)}_{values[name].upper()}=y" for name in _CHOICES if values[name] is not None
    ]
    for name in _NUMBERS:
        value = values[name.replace("-", "_")]
        words += [f"{_symbol(name)}={value}"] if value is not None else []
    layers = step_layers(
        args.build_dir, [parse_command_line_settings(words), parse_command_line_settings(args.set)]
    )
    plan = make_plan(layers, args.build_dir, steps=args.ra_mla_ablation_step)
    if args.dry_run or plan.base.study.dry_run:
        cases = plan_cases(layers, build_dir=args.build_dir).only(
            [run.variant.slug for run in plan.runs]
        )
        code, text = check_and_report(cases, CheckRequest(args.build_dir))
        sys.stdout.write(text)
        return code
    options = run_options(args, plan.base.study)
    code, text = launch.train_plan(plan, options, table_plan(plan, layers))
    sys.stdout.write(text)
    return code


def _symbol(name: str) -> str:
    return name.upper().replace("-", "_")


if __name__ == "__main__":
    console.run_main(main)
