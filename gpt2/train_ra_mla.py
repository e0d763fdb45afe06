#!/usr/bin/env python3
"""Train one step of the RATIO study, or one run in this process for a debugger.

    gpt2/train_ra_mla.py --ra-mla-ablation-step 7
    gpt2/train_ra_mla.py --ra-mla-ablation-step mla-golden --optimizer adamw --dataset shakespeare
    gpt2/train_ra_mla.py --ra-mla-ablation-step 7 --dry-run
    python -m pdb gpt2/train_ra_mla.py --ra-mla-ablation-step 7 --in-process

The step is applied on top of .config, or of defconfigs/gpt2-ratio-ablation if there is no .config.
With --in-process, no step is the single training of .config, errors keep their traceback, Ctrl-C
saves a checkpoint, and torchrun can start the ranks. Flags are equivalent to SET: --optimizer adamw
sets OPTIMIZER_ADAMW=y; --seed is SEEDS. .config is not modified. Run directory and exit codes are the
same as for make.
"""

from argparse import Namespace, RawDescriptionHelpFormatter

import _start

from gpt2.check.cases import config_layers_to_check, plan_cases
from gpt2.check.command import check_and_report
from gpt2.running import launch
from gpt2.running.continued import continue_half_trained
from gpt2.study.arguments import run_options
from gpt2.study.plan import config_layers, make_plan, table_plan
from lib import console
from lib.commands import variables_of
from lib.config.layers import ConfigLayer, parse_command_line_settings
from lib.env.ranks import current_process
from lib.kablate import add_options

_CHOICES = ("optimizer", "dataset", "tokenizer", "pruning", "device", "precision")
_NUMBERS = ("max-iters", "batch-size", "grad-accumulation", "global-batch", "block-size")


def main() -> int:
    """Run the command line."""
    parser = console.CommandLine(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    step = "--ra-mla-ablation-step"
    parser.add_argument(step, default="", metavar="N", help="number or slug of the step")
    parser.add_argument("--in-process", action="store_true", help="train in this process")
    for name in _CHOICES:
        parser.add_argument(f"--{name}", metavar="NAME", help=f"{_symbol(name)}_NAME=y")
    for name in _NUMBERS:
        parser.add_argument(f"--{name}", metavar="N", help=f"{_symbol(name)}=N")
    parser.add_argument("--seed", default="", metavar="N", help="the seed to train")
    parser.add_argument("--set", default="", metavar='"A=1 B=y"', help="any other setting")
    parser.add_argument(
        "--dry-run", action="store_true", help="check the step, as make check FAST=1 does"
    )
    add_options(parser, variables_of("@run CONTINUE"))
    args = parser.parse_args()
    args.command_line = "make"
    steps, build = args.ra_mla_ablation_step, args.build_dir
    if not steps and not args.in_process:
        parser.error(f"the following arguments are required: {step}")
    settings = _settings(args)
    if steps:
        study = ConfigLayer.of("command line", step, {"RA_MLA_ABLATION_MODE": True})
        layers = [*config_layers_to_check(build), study, *settings]
    else:
        layers = [*config_layers(build), *settings]
    plan = make_plan(layers, build, steps=steps, seeds=args.seed)
    if args.dry_run or plan.base.study.dry_run:
        slugs = [run.variant.slug for run in plan.runs]
        code, text = check_and_report(
            plan_cases(layers, build_dir=build).only(slugs), build, fast=True
        )
        console.show(text)
        return code
    options = run_options(args, plan.base.study)
    # The other processes of torchrun wait for the first.
    if vars(args)["continue"] and current_process().is_main:
        continue_half_trained(plan.runs, plan.folder)
    if args.in_process:
        return launch.train_here(plan, options)
    code, text = launch.train_plan(plan, options)
    console.show(text)
    return code


def _settings(args: Namespace) -> list[ConfigLayer]:
    """Return the settings of the flags, and those of --set."""
    given = {name: vars(args)[name.replace("-", "_")] for name in (*_CHOICES, *_NUMBERS)}
    words = [f"{_symbol(n)}_{given[n].upper()}=y" for n in _CHOICES if given[n] is not None]
    words += [f"{_symbol(n)}={given[n]}" for n in _NUMBERS if given[n] is not None]
    return [parse_command_line_settings(words), parse_command_line_settings(args.set)]


def _symbol(name: str) -> str:
    return name.upper().replace("-", "_")


if __name__ == "__main__":
    console.run_main(main)
