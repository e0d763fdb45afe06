"""The commands that train: ``all``, ``rerun``, ``prolong``, ``reproduce``; and what they need before."""

import json
import os
from argparse import Namespace
from dataclasses import replace

from gpt2.check.cases import plan_cases
from gpt2.check.command import check_and_report
from gpt2.data.dataset import dataset_folder, open_dataset
from gpt2.data.prepare import prepare_dataset
from gpt2.memory.micro_batch import with_one_sequence
from gpt2.running import launch
from gpt2.running import reproduce as reproduction
from gpt2.running.continued import continue_half_trained
from gpt2.running.preflight import TrainingPlace, describe, describe_text
from gpt2.running.prolong import plan_prolonged, with_other_forks
from gpt2.study.arguments import asked_layers, asked_plan, run_options, settings_layers
from gpt2.study.plan import table_plan
from gpt2.study.power import confirm_power
from gpt2.study.resolve import resolve_config
from lib.config.tree import KconfigTree
from lib.console import log
from lib.env.machine import worker_environment
from lib.errors import EXIT_DONE, EXIT_PREFLIGHT, ConfigError, Problem
from lib.make_variables import require_value
from lib.report.render import json_document


def train(options: Namespace) -> int | tuple[int, str]:
    """Train the runs of .config: a single training, the steps of a study, or a test matrix.

    kablate all                    all unfinished runs, then print the table
    kablate all --steps 0-3,ra     only these steps
    kablate all --seeds 1-3        every step with three seeds
    kablate all --seeds auto       more seeds until every comparison has a word
    kablate all --gpus 2 --continue   go on with runs that are half-trained on another number of GPUs
    kablate all --dry-run          check the runs, as make check FAST=1 does
    kablate all --worker           train what nobody trains, without question and table (slurm)

    Events go to stderr, the table to stdout. Finished runs are skipped, stopped runs are resumed. Exit
    codes: 0 all done, 1 a run failed, 2 configuration, 3 machine or data (nothing started), 124 time
    limit, 130 Ctrl-C; with --strict those of verdicts too.
    """
    plan = asked_plan(options)
    plan = plan.only(options.runs)
    if vars(options)["continue"]:
        continue_half_trained(plan.runs, plan.folder)
    settings = run_options(options, plan.base.study)
    if options.dry_run or plan.base.study.dry_run:
        slugs = [run.variant.slug for run in plan.runs]
        cases = plan_cases(asked_layers(options), build_dir=options.build_dir).only(slugs)
        return check_and_report(cases, options.build_dir, fast=True, json_document=options.json)
    if options.worker:
        return launch.train_runs(plan, plan.runs, replace(settings, wait=False))
    confirm_power(plan, options.yes)
    return launch.train_plan(plan, settings, json=options.json, strict=options.strict)


def rerun(options: Namespace) -> tuple[int, str]:
    """Train finished runs again. The old run directories are moved aside, not deleted.

    kablate rerun ra                 the run with this slug, every seed
    kablate rerun 'mla-*,7' --yes    several runs, without confirmation

    A pattern is a shell pattern over slugs, numbers, labels (ratio/05-ra) and directory names.
    """
    runs = require_value(options.runs, "RUNS", "make rerun RUNS=PATTERN")
    whole = asked_plan(options)
    settings = run_options(options, whole.base.study)
    plan = launch.rerun(whole, runs, yes=options.yes)
    return launch.train_plan(plan, settings, table_plan(whole), json=options.json)


def prolong(options: Namespace) -> tuple[int, str]:
    """Train a finished run further, as new runs that start from its weights: its forks.

    kablate prolong ra --iters 240                240 more iterations of a run in the plan of .config
    kablate prolong results/ratio/ra-s1-1a2b3c4d --iters 240 --set "LEARNING_RATE=1e-4"
    kablate prolong ra --iters 240 --count 3      three continuations with other data orders
    kablate prolong ra --iters 240 --from 120     from the checkpoint that the run kept of iteration 120

    The new runs are below a folder of the results named after the run, and the table compares all of
    its forks. Their settings are the recorded ones, except for MAX_ITERS, INIT_FROM and SEED, and for
    folders, commands and trackers, which are those of .config. The learning rate follows a schedule of
    its own; the optimizer's state is new, except from a checkpoint. Exit codes: 1 the run failed, 2
    unknown or unfinished run, or a setting without effect.
    """
    example = "make prolong RUN=NAME ITERS=240"
    run = require_value(options.run, "RUN", example)
    require_value(options.iters, "ITERS", example)
    plan = plan_prolonged(
        run,
        options.build_dir,
        options.iters,
        settings_layers(options),
        seeds=options.seeds,
        count=options.count,
        at=vars(options)["from"],
    )
    settings = run_options(options, plan.base.study)
    return launch.train_plan(plan, settings, with_other_forks(plan), json=options.json)


def reproduce(options: Namespace) -> tuple[int, str]:
    """Train a finished run again from its directory, and compare the results byte by byte.

    kablate reproduce --run DIR                 with the data in the build folder (prepared if missing)
    kablate reproduce --run DIR --data DATA     with another data folder
    kablate reproduce --run DIR --force         even if code, torch, device or data differ
    kablate reproduce --twice                   train .config twice instead; of a study, the first run
    kablate reproduce --twice --steps ra        this step of the study
    kablate reproduce --twice --defconfig NAME  this configuration instead of .config (or --run DIR)

    Does not require or modify .config. New runs are created in the folder "reproduced" (with --twice
    "determinism") of the build folder. Prints BITWISE, DIVERGED with the first differing field, or NOT
    COMPARABLE with every reason: different torch, device, data set or code. If the code differs, the
    commands are printed that restore commit and uncommitted edits of the run in another folder. Exit
    codes: 0 the same bytes, 1 diverged or failed, 2 configuration or no such run, 3 machine or data, 4
    not comparable.
    """
    o = options
    if o.twice:
        return reproduction.train_twice(o.build_dir, o.run, o.defconfig, o.steps, json=o.json)
    if o.defconfig or o.steps:
        what, where = "requires TWICE=1", "DEFCONFIG, STEPS"
        raise ConfigError(Problem(what, where, code="usage.missing-argument"))
    return reproduction.reproduce(o.run, o.build_dir, o.data, force=o.force, json=o.json)


def preflight(options: Namespace) -> tuple[int, str]:
    """Check whether this machine and environment can train the runs of .config.

    kablate preflight              one line per fact and condition
    kablate preflight --json       the same as one JSON document

    Runs all checks that every training command runs before it starts, and writes the environment
    snapshot (the folder "environment" beside .config). Does not train or download anything. Exit codes:
    0 all conditions are met that can be tested here, 2 configuration, 3 a condition is not met.
    """
    plan = asked_plan(options)
    # The same environment variables as in a run: libraries read them at import.
    os.environ.update(worker_environment(plan.base.machine))
    place = TrainingPlace(plan.build_dir, plan.folder, options.allow_dirty)
    report = describe([run.config for run in plan.runs], place)
    code = EXIT_DONE if report["passed"] else EXIT_PREFLIGHT
    if options.json:
        return code, json.dumps(report, sort_keys=True, allow_nan=False) + "\n"
    return code, describe_text(report)


def data(options: Namespace) -> str:
    """Prepare the configured data set: download, tokenize, split, digest.

    An existing data set is not prepared again. --json prints the folder of the data set and its digest.
    --verify prepares nothing and checks every byte against the manifest. Exit codes: 3 the data set is
    missing, damaged or cannot be prepared; 130 interrupted (the next call resumes a large data set).
    """
    tree = KconfigTree()
    config = resolve_config(tree, with_one_sequence(tree, asked_layers(options))).data
    if options.verify:
        folder = dataset_folder(config, options.build_dir)
        dataset = open_dataset(config, options.build_dir)
        log("DATA", f"{folder}: every byte verified, digest {dataset.digest}")
    else:
        folder = prepare_dataset(config, options.build_dir)
        log("DATA", f"{folder} is ready")
    if not options.json:
        return ""
    digest = open_dataset(config, options.build_dir).digest
    return json_document(1, {"folder": str(folder), "digest": digest})
