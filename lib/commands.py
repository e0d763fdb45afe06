"""The commands of make and of kablate, and the variables that each of them reads.

The command lines, their help, completion, the refusal of variables without effect, and the table of
docs/configuration.md come from here. Standard library only, in syntax of older Python versions: help
works before there is an environment.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Columns: name; an example of the value; kind of the value; meaning. In lower case, an option of the
# command line that is no variable of make. The first five are in the short help.
#
# Kinds: text; count and positive, integers of at least 0 and 1; number, a real number; flag, y or n,
# as an option without a value; switch, y or n, as an option with one; or A/B/C, one of these.
_VARIABLES = """
STEPS                0-3,ra,16      text       Only these steps of a study
SEEDS                1-3            text       These seeds; auto: more until each comparison has a word
SET                  "A=1 B=y"      text       Settings on top of .config, for this command only
SWEEP                "A=1,2 B=.."   text       All combinations of these values
O                    DIR            text       Folder of .config, data and results, not the tree
SEED                 7              count      One seed, of runs or of what is drawn; several: SEEDS=
SAMPLES              n              positive   Texts to generate
RUNS                 PATTERN        text       Runs: patterns over the names of make plan, or paths
RUN                  NAME           text       A run: its name in make plan or folder; report: several
CONTINUE             y              flag       Go on with runs half-trained on another number of GPUs
GPUS                 n              text       GPUs of each run
JOBS                 n              count      Concurrent runs, as -jN; 0: as many as fit
KEEP_GOING           y|n            switch     Whether to start more runs after a failure
ON_STALE             rerun          stop/rerun/keep  What to do with runs made by other code
ALLOW_DIRTY          y              flag       Train uncommitted code, and save the diff
DRY_RUN              1              flag       Check the runs as FAST=1 does, and train none
STRICT               1              flag       Exit code 5 if a comparison is INCONCLUSIVE
PROBE                1              flag       Time some steps of each model on this machine
GPU                  h100           text       The GPU to fit; of plan, to predict on; of bench, 1
CHECK_GPU_MEMORY_GB  n              text       Memory of a GPU that is not known by name
SUBMIT               y              flag       Submit the batch script
ITERS                n              positive   Iterations, added ones of prolong; of bench, rounds
FROM                 n              count      Iteration of a kept checkpoint; default: the last one
COUNT                n              positive   Number of forks
CHECKS               causal,data    text       Only these checks
FAST                 1              flag       Skip what is slow
JUNIT                FILE           text       Also write the results as JUnit XML
DATA                 DIR            text       Folder of the data; of check, require: it must exist
VERIFY               1              flag       Check every byte of the data set, and prepare nothing
DEFCONFIG            NAME           text       This configuration instead of .config
TWICE                1              flag       Train .config (or RUN=) twice, and compare
FORCE                1              flag       Train even if the result will not be comparable
SYM                  NAME           text       The symbol; NAME=VALUE: whether it would take effect
A                    RUN            text       The first of two runs
B                    RUN            text       The second
AXIS                 SYMBOL,..      text       Settings in which the runs differ on purpose
LABEL_BY             FIELD,..       text       Settings that may differ too, shown as labels
WHERE                "N_LAYER=6"    text       Conditions, with = != < <= > >=
SOURCE               wandb          local/wandb                 Where the settings are read
CLAIMS               FILE           text       Quoted numbers; default: claims.toml
OUT                  DIR            text       The folder to write to
QUANT                int8           text       Quantization of the weights: none, int8, nf4, fp4
PROMPT               "..."          text       The text to continue; default: a new document
TOKENS               n              positive   Tokens to generate; of bench-nsa, the longest text
TEMPERATURE          x              number     Divides the logits; 0 is greedy decoding
TOP_K                n              count      Sample from the k most likely tokens; 0: all
TOP_P                x              number     Sample from the fewest tokens of this probability
FULL                 1              flag       The long context at full length
EXTRAS               "liger .."     text       Optional packages of pyproject.toml
JSON                 1              flag       Print one JSON document
YES                  1              flag       Skip confirmation prompts
KCONFIG_CONFIG       FILE           text       Another name of .config
MENUCONFIG_STYLE     NAME           text       Colours of menuconfig
PYTHON               PATH           text       Use this interpreter, install nothing
V                    0|1|2          0/1/2      Short lines; full commands; why a target is remade
NO_COLOR             1              flag       No colours
spec                 NAME[+FRAG]    text       The configuration, with fragments on top
worker               y              flag       Train runs until none is free, without a table
one-line             y              flag       Only the summary
entity               NAME           text       W&B user or team
rounds               n              positive   Rounds of measurement
device               cpu            cpu/cuda   Default: a GPU if there is one
"""

# Groups, the first without a name for a part of other targets; columns: name; module and function;
# the variables that it reads, NAME or NAME=DEFAULT, in <> those that may be words without an option;
# meaning. The docstring of the function is the help of the command. A - stands for what the Makefile
# does alone, or for no variable.
_COMMANDS = """
constants        gpt2.configure:constants        -                     Generate config.py from .config

Configure
menuconfig       gpt2.configure:menuconfig  -                     Edit .config in a menu
list-defconfigs  gpt2.configure:list_defconfigs  JSON            List the configurations of the tree
defconfig        gpt2.configure:defconfig        <spec> SET DRY_RUN  Load one, with fragments on top, and SET="..."
savedefconfig    gpt2.configure:savedefconfig  -                     Write the non-default settings to defconfig
olddefconfig     gpt2.configure:olddefconfig  -                     Update an old .config to the current symbols
randconfig       gpt2.configure:random           SEED            Write a random valid .config, small; SEED= repeats it
why              gpt2.configure:why              <SYM> SET STEPS JSON  Show the source of SYM='s value, and its dependencies

Run
all              gpt2.running.commands:train     @plan @run RUNS CONTINUE DRY_RUN STRICT JSON worker  Train the runs of .config, print the table (the default)
data             gpt2.running.commands:data      SET GPUS VERIFY JSON  Prepare the data set; VERIFY=1: check every byte
plan             gpt2.study.commands:plan     @plan GPU PROBE JSON  List the runs and their cost; trains nothing
status           gpt2.study.commands:status   @plan JSON one-line   Show which runs are done, running and missing
watch            gpt2.study.commands:watch    @plan JSON            Monitor the runs: curves, time left, alarms
stop             gpt2.study.commands:stop     @plan RUNS            Stop the running runs (RUNS=) and save checkpoints
slurm            gpt2.study.commands:slurm    @plan @run RUNS CONTINUE SUBMIT  Print a batch script of workers; SUBMIT=y submits it
rerun            gpt2.running.commands:rerun     <RUNS> @plan @run JSON  Train the finished runs that match RUNS= again
prolong          gpt2.running.commands:prolong   <RUN> ITERS SEEDS COUNT=1 FROM SET GPUS @run JSON  Train ITERS= more from the weights of a finished RUN=

Check
preflight        gpt2.running.commands:preflight  @plan ALLOW_DIRTY JSON  Check machine and environment for .config's runs
check            gpt2.check.command:run          SET GPUS STEPS CHECKS FAST DEFCONFIG DATA GPU CHECK_GPU_MEMORY_GB JUNIT JSON  Verify every step on this CPU before it costs GPU hours
reproduce        gpt2.running.commands:reproduce  RUN DATA FORCE TWICE DEFCONFIG STEPS JSON  Train RUN= again from its directory, compare every byte
test             -                               FAST                  Run the tests (FAST=1: a fast part); needs the extras
style            -                               -                     Check formatting, lint, types, whitespace, rules

Evaluate
ls               gpt2.records.listing:ls         WHERE JSON            List all runs of all studies, or those WHERE=
clean-runs       gpt2.records.listing:clean_runs  WHERE YES JSON      Remove the runs WHERE=, after a confirmation
report           gpt2.records.commands:report    @plan RUN LABEL_BY JSON  Write report.html, tables and the index of all studies
verdicts         gpt2.records.commands:verdicts  @plan STRICT JSON     Which steps are better, worse or equivalent, over SEEDS=
figures          gpt2.records.commands:figures   @plan RUNS JSON       Write the figures of the report (or of RUNS=) as files
claims           gpt2.records.commands:check_claims  @plan CLAIMS OUT JSON  Check CLAIMS=; write LaTeX and Markdown if all hold
audit            gpt2.records.audit:audit_runs  @find RUNS JSON     Check the files of RUNS=: VALID, or INVALID with reasons
compare          gpt2.records.compare:compare_asked  <A> <B> @find AXIS LABEL_BY JSON  Compare runs A= and B= (A=ra B=baseline)
verify-results   gpt2.records.verify:verify_results  @plan RUNS SOURCE=local AXIS JSON entity  Check whether RUNS= may be published together
evaluate         gpt2.running.trained_models:evaluate  RUN SEEDS QUANT=none JSON  Evaluate RUN= again; QUANT=int8 quantizes its weights
generate         gpt2.running.trained_models:generate  RUN SEEDS PROMPT TOKENS=100 TEMPERATURE=1 TOP_K=0 TOP_P=1 SEED=1 SAMPLES=1 JSON  Generate text with the finished run RUN=, after PROMPT=
export           gpt2.running.trained_models:export    <RUN> @find OUT       Export RUN= to a folder that transformers can load
bench            gpt2.bench.commands:bench_step  @plan ITERS GPU JSON   Time a step beside plain GPT-2 loops; GPU=1: all tables
bench-nsa        gpt2.bench.commands:bench_nsa   TOKENS=16384 JSON rounds=5  Time sparse against full attention
validate-machine  gpt2.nsa.validate:run          FULL JSON device      Validate NSA on this device (FULL=1: long contexts)

Operate
setup            -                               EXTRAS                Create the Python environment; EXTRAS= adds packages
help             -                               V                     Show this text; V=1: all variables
completion       -                               -                     Completion of bash, zsh: source <(make -s completion)
clean            -                               -                     Remove generated files; keeps .config, data and results
"""
# Variables that several commands read: those that find a run, that plan runs, that train them.
_SETS = {
    "@find": "SET GPUS STEPS SEEDS SEED",
    "@plan": "SET GPUS STEPS SEEDS SEED SWEEP YES",
    "@run": "JOBS ON_STALE KEEP_GOING=y ALLOW_DIRTY",
}
# Variables of make itself, of the console, and of every command.
COMMON = ("O", "V", "PYTHON", "EXTRAS", "NO_COLOR", "KCONFIG_CONFIG", "MENUCONFIG_STYLE")


class Variable(NamedTuple):
    """A variable of make, and the option of the same name."""

    name: str
    # An example of the value.
    value: str
    kind: str
    text: str

    @property
    def key(self) -> str:
        """Return the name of the value among parsed options."""
        return self.name.lower().replace("-", "_")

    @property
    def option(self) -> str:
        """Return the name of the option."""
        return "--" + self.key.replace("_", "-")

    @property
    def choices(self) -> list[str]:
        """Return the possible values, or [] if the kind does not list them."""
        return self.kind.split("/") if "/" in self.kind else []


class Command(NamedTuple):
    """A target of make, and the command ``kablate NAME``."""

    group: str
    name: str
    # module:function, or "-".
    run: str
    # The default of each variable that the command reads, and those that may be words.
    reads: dict[str, str]
    words: list[str]
    text: str


def _variables() -> dict[str, Variable]:
    rows = (Variable(*re.split(" {2,}", line)) for line in _VARIABLES.strip().split("\n"))
    return {variable.name: variable for variable in rows}


def variables_of(text: str) -> dict[str, str]:
    """Return the default of each variable of a cell of the table, "" if it has none."""
    listed = " ".join(_SETS.get(word, word.strip("<>")) for word in text.split() if word != "-")
    pairs = [word.partition("=") for word in listed.split()]
    return {variable: default for variable, _, default in pairs}


def _commands() -> dict[str, Command]:
    commands, group = {}, ""
    for line in filter(None, _COMMANDS.split("\n")):
        name, *columns = re.split(" {2,}", line)
        if not columns:
            group = name
            continue
        run, variables, text = columns
        words = re.findall("<(.*?)>", variables)
        commands[name] = Command(group, name, run, variables_of(variables), words, text)
    return commands


VARIABLES = _variables()
COMMANDS = _commands()
# Those that make has as targets.
TARGETS = [name for name, command in COMMANDS.items() if command.group]


def readers(variable: str) -> list[str]:
    """Return the names of the commands that read a variable."""
    return [name for name, command in COMMANDS.items() if variable in command.reads]
