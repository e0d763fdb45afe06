# The front door: what a target does is in scripts/. "make help" is made from the ## texts.

MAKEFLAGS += --no-builtin-rules --no-builtin-variables --no-print-directory
# Parallel are the runs (make -jN is JOBS=N), never the targets.
.NOTPARALLEL:
.SUFFIXES:

# What a user may set. A value is text: frozen here, before anything could expand it, it reaches
# the scripts through the environment, and $(...), quotes and backquotes mean nothing on the way.
SETTINGS := SET SYM A B STEPS SEEDS RUNS RUN TO JOBS STALE KEEP_GOING YES JSON V O EXTRAS PYTHON
SETTINGS += SWEEP SAMPLES ITERS QUANT PROMPT TOKENS TEMPERATURE TOP_K TOP_P SEED
SETTINGS += DIRTY N CHECKS FAST DEFCONFIG DATA GPU CHECK_GPU_MEMORY_GB DRY_RUN
SETTINGS += AXIS LABEL_BY FORCE SOURCE FULL
SETTINGS += NO_COLOR KCONFIG_CONFIG MENUCONFIG_STYLE
freeze = $(eval override $(1) := $$(value $(1)))$(eval export $(1))
given = $(filter-out undefined,$(origin $(1)))
$(foreach v,$(SETTINGS) VIRTUAL_ENV CONDA_PREFIX,$(if $(call given,$v),$(call freeze,$v)))
# Names in __ are bash completion's.
UNKNOWN := $(filter-out __%,$(foreach v,$(.VARIABLES),$(if $(filter command,$(origin $v)),$v)))
$(if $(UNKNOWN),$(error no variable is called $(UNKNOWN); see make help))
MAKEOVERRIDES :=

Q := $(if $(filter-out 0,$(V)),,@)
MAKEFLAGS += $(if $(filter 2,$(V)),--trace)

# As one word of the shell, and as one file name of a rule.
quote = '$(subst ','\'',$(1))'
space := $(subst ,, )
escape = $(subst :,\:,$(subst $(space),\ ,$(1)))

BUILD := $(or $(O),.)
DOTCONFIG := $(or $(KCONFIG_CONFIG),.config)
DOTCONFIG := $(if $(filter /%,$(DOTCONFIG)),,$(BUILD)/)$(DOTCONFIG)
CONFIG_PY := $(call escape,$(BUILD)/config.py)
KCONFIGS := $(wildcard Kconfig gpt2/Kconfig* gpt2/*/Kconfig* gpt2/*/*/Kconfig* lib/*/Kconfig* \
	lib/*/*/Kconfig*)

# An active environment is used as it is; without one, make looks after a .venv: the tree's, or where
# that cannot be written and was not made in this place, one in the build folder.
PLACE := $(call quote,"place": "$(CURDIR)/.venv )
VENV := $(shell { test -w . || grep -qsF $(PLACE) .venv/kablate-setup.json; } && echo .venv)
VENV := $(or $(VENV),$(BUILD)/.venv)
venv = $(call quote,$(VENV))
ACTIVE := $(or $(PYTHON),$(if $(VIRTUAL_ENV),$(VIRTUAL_ENV)/bin/python))
ACTIVE := $(or $(ACTIVE),$(if $(CONDA_PREFIX),$(CONDA_PREFIX)/bin/python))
ifeq ($(ACTIVE),$(CURDIR)/.venv/bin/python)
ACTIVE :=
endif
PY := $(call quote,$(or $(ACTIVE),$(VENV)/bin/python))
# The same, or the system's where that cannot be run: enough to set up and to help.
BOOT := $(shell command -v $(PY) || command -v python3.11 || command -v python3)
boot = $(call quote,$(or $(BOOT),$(error Python is missing: sudo apt-get install python3-venv)))
SETUP = $(boot) -m lib.env $(TARGET_PYTHON) --extras
TARGET_PYTHON := $(if $(ACTIVE),--active $(call quote,$(ACTIVE)),--venv $(venv))

INTO := -O $(call quote,$(BUILD))
CONFIGURE := $(PY) scripts/configure.py
# make -jN, as JOBS=N for one command; known only once a recipe runs.
jobs = $(if $(JOBS),,$(patsubst -j%,JOBS=%,$(filter -j%,$(MAKEFLAGS))))

.DEFAULT_GOAL := all

##@ Configure
.PHONY: menuconfig savedefconfig olddefconfig listnewconfig diffconfig list-defconfigs why
menuconfig: setup ## Edit .config in a menu
	$(Q)$(CONFIGURE) menuconfig $(INTO)

list-defconfigs: setup ## The configurations that come with the tree
	$(Q)$(CONFIGURE) list-defconfigs $(INTO)

##: defconfig-NAME[+FRAG]  Load one of them, with fragments on top, and SET="..."
DEFCONFIGS := $(patsubst defconfigs/%,defconfig-%,$(filter-out %/fragments,$(wildcard defconfigs/*)))
dry_run = $(if $(filter-out 0 n,$(DRY_RUN)), DRY_RUN=y)
load = $(Q)$(CONFIGURE) defconfig $(call quote,$*) --set "$$SET$(dry_run)" $(INTO)
# Named one by one, so that a shell can complete them; combinations match the pattern.
.PHONY: $(DEFCONFIGS) FORCE
$(DEFCONFIGS): defconfig-%: setup
	$(load)
defconfig-%: setup FORCE
	$(load)

savedefconfig: setup ## Write what differs from the defaults to defconfig
	$(Q)$(CONFIGURE) savedefconfig $(INTO)

olddefconfig: setup ## Bring an old .config up to date
	$(Q)$(CONFIGURE) olddefconfig $(INTO)

listnewconfig: setup ## Symbols that .config does not mention
	$(Q)$(CONFIGURE) listnewconfig $(INTO)

diffconfig: setup ## What differs from A= to B= (.config.old to .config)
	$(Q)$(CONFIGURE) diffconfig $${A:+"$$A"} $${B:+"$$B"} $(INTO)

why: setup ## Where the value of SYM= came from, and its dependencies
	$(Q)$(CONFIGURE) why $(INTO) -- "$${SYM:?type make why SYM=NAME}"

$(call escape,$(DOTCONFIG)): | setup
	@echo "CONFIG  there is no .config: taking gpt2-quickstart (make list-defconfigs)" >&2
	$(Q)$(CONFIGURE) defconfig gpt2-quickstart $(INTO)

$(CONFIG_PY): $(call escape,$(DOTCONFIG)) $(KCONFIGS) | setup
	$(Q)$(CONFIGURE) constants $(INTO)

##@ Run
.PHONY: all data data-verify plan train try status watch stop rerun
all: $(CONFIG_PY) ## Train what .config says, print the table (the default)
	$(Q)$(jobs) $(PY) scripts/run_test_matrix.py $(INTO) $${RUNS:+--runs "$$RUNS"}

data: $(CONFIG_PY) ## Prepare the data set, once
	$(Q)$(PY) scripts/prepare_data.py $(INTO) > /dev/null

data-verify: $(CONFIG_PY) ## Check every byte of it against its manifest
	$(Q)$(PY) scripts/prepare_data.py --verify $(INTO) > /dev/null

plan: $(CONFIG_PY) ## List the runs and what they cost; starts nothing
	$(Q)$(PY) scripts/plan.py $(INTO)

status: $(CONFIG_PY) ## What is done, what runs, what is left
	$(Q)$(PY) scripts/status.py $(INTO)

watch: $(CONFIG_PY) ## Look at the runs, live: curves, time left, health
	$(Q)$(PY) scripts/watch.py $(INTO)

stop: $(CONFIG_PY) ## As Ctrl-C does: the runs at work (RUNS=) save and stop
	$(Q)$(PY) scripts/stop.py $(INTO)

train: $(CONFIG_PY) ## One run in this process, for debugging
	$(Q)$(PY) scripts/train.py $(INTO)

try: $(CONFIG_PY) ## Train one change (SET=) against .config, briefly
	$(Q)$(jobs) $(PY) scripts/try_change.py $(INTO) -- "$${SET:?type make try SET=A=1}"

rerun: $(CONFIG_PY) ## Do the runs that RUNS= matches again
	$(Q)$(jobs) $(PY) scripts/rerun.py $(INTO) -- "$${RUNS:?type make rerun RUNS=PATTERN}"

##@ Check
.PHONY: preflight check randcheck knobs reproduce determinism test test-long style
preflight: $(CONFIG_PY) ## Whether this machine may train .config's runs
	$(Q)$(PY) scripts/preflight_env.py $(INTO)

check: setup ## Prove every step on this CPU, before it costs GPU hours
	$(Q)$(PY) scripts/check.py $(INTO)

randcheck: setup ## The same for N= random configurations (SEED=)
	$(Q)$(PY) scripts/randcheck.py $(INTO)

knobs: setup ## Prove that every symbol (or SYM=) changes something
	$(Q)$(PY) scripts/check_knobs.py $(INTO)

reproduce: setup ## Train the finished RUN= anew from its directory, compare
	$(Q)$(PY) scripts/reproduce.py $(INTO)

determinism: setup ## Train .config, RUN= or DEFCONFIG= twice, compare
	$(Q)$(PY) scripts/determinism.py $(INTO)

# The tests read local copies of the large data sets, with what reads the hub's, log to every
# tracker, and draw.
test: ## Run the tests; they need the extras
	@$(SETUP) "$$EXTRAS datasets matplotlib tensorboard trackio"
	$(Q)$(PY) -m pytest

test-long: ## Plant faults one by one; the check has to name each
	@$(SETUP) "$$EXTRAS datasets matplotlib tensorboard trackio"
	$(Q)$(PY) -m pytest -m long

style: setup ## Formatting, whitespace, names in the documents
	$(Q)$(PY) scripts/check_style.py

##@ Judge
.PHONY: report audit compare finalists verify-results curves sweep-leaderboard evaluate generate \
	export bench bench-knobs bench-overhead bench-nsa needle validate-machine
report: $(CONFIG_PY) ## Write the tables of the finished runs
	$(Q)$(PY) scripts/report.py $(INTO)

audit: setup ## Judge RUN= by its own files: VALID, or INVALID and why
	$(Q)$(PY) scripts/audit_run.py $(INTO) --run "$${RUN:?type make audit RUN=NAME}"

compare: setup ## Runs A= and B=: the same bytes, or how far apart
	$(Q)$(PY) scripts/compare_runs.py $(INTO)

finalists: setup ## Test the variants in RUNS= over their seeds
	$(Q)$(PY) scripts/finalists.py $(INTO)

verify-results: $(CONFIG_PY) ## Whether the runs (RUNS=) may be published together
	$(Q)$(PY) scripts/verify_results.py $(INTO)

curves: $(CONFIG_PY) ## Draw loss curves of the runs (RUNS=), needs matplotlib
	$(Q)$(PY) scripts/draw_curves.py $(INTO)

sweep-leaderboard: $(CONFIG_PY) ## The runs of sweeps, best first
	$(Q)$(PY) scripts/sweep_leaderboard.py $(INTO)

evaluate: setup ## Evaluate RUN= again; QUANT=int8 rounds its weights
	$(Q)$(PY) scripts/evaluate.py $(INTO) --run "$${RUN:?type make evaluate RUN=NAME QUANT=int8}"

generate: setup ## Write text with the finished run RUN=, after PROMPT=
	$(Q)$(PY) scripts/generate.py $(INTO) --run "$${RUN:?type make generate RUN=PATTERN PROMPT=TEXT}"

export: $(CONFIG_PY) ## Write RUN= as a folder that transformers loads
	$(Q)$(PY) scripts/export.py $(INTO) $${TO:+--to="$$TO"} -- "$${RUN:?type make export RUN=NAME}"

bench: setup ## Time the trainer and every mechanism on this CPU
	$(Q)$(PY) scripts/bench.py $(INTO)

bench-knobs: $(CONFIG_PY) ## Time each setting that trades speed (SYM=), one by one
	$(Q)$(PY) scripts/bench_knobs.py $(INTO)

bench-overhead: $(CONFIG_PY) ## Time what records cost, and trackers; N= pairs
	$(Q)$(PY) scripts/bench_overhead.py $(INTO)

bench-nsa: setup ## Sparse beside full attention (TOKENS=), needs matplotlib
	$(Q)$(PY) scripts/bench_nsa.py $(INTO)

needle: setup ## Train small models to find what only selection reaches
	$(Q)$(PY) scripts/needle.py $(INTO)

validate-machine: setup ## Prove NSA on this device (FULL=1: long contexts)
	$(Q)$(PY) scripts/validate_machine.py $(INTO)

##@ Operate
.PHONY: setup tensorboard trackio-view help clean mrproper
setup: ## Make the Python environment; EXTRAS="..." adds to it
	@$(SETUP) "$$EXTRAS"

tensorboard: $(CONFIG_PY) ## Serve its page of the runs, to this machine alone
	$(Q)$(PY) scripts/dashboard.py tensorboard $(INTO)

trackio-view: $(CONFIG_PY) ## The same with trackio
	$(Q)$(PY) scripts/dashboard.py trackio $(INTO)

help: ## This text
	@$(boot) -m lib.make_help Makefile "$$(test ! -f $(call quote,$(DOTCONFIG)) || \
		$(PY) scripts/status.py --one-line $(INTO) 2> /dev/null || \
		echo 'There is a .config: make plan tells what it would run')"

clean: ## Remove generated files, but no .config, data or results
	$(Q)for file in config.py check.json defconfig; do rm -f $(call quote,$(BUILD))/$$file; done
	$(Q)rm -f $(call quote,$(BUILD))/randcheck-*.defconfig
	$(Q)! test -w . || rm -rf .pytest_cache \
		$$(find gpt2 lib scripts tests -name __pycache__ -prune)

mrproper: clean ## And .config, and a .venv that make made
	$(Q)for file in '' .old .origins; do rm -f $(call quote,$(DOTCONFIG))$$file; done
	$(Q)if [ -L $(venv) ]; then rm $(venv); \
		elif [ -e $(venv)/kablate-setup.json ]; then rm -rf $(venv); fi

##@ Variables
##: STEPS=0-3,ra,16  Only these steps of a study
##: SEEDS=1,2,3  Every step with each of these seeds; or SEED=7 alone
##: RUN=NAME  One run, as make plan names it, or its directory
##: TO=DIR  For export: the new folder
##: SET="A=1 B=y"  For defconfig-NAME and try: settings on top
##: SWEEP="A=1,2 B=.."  Combinations of .config instead, or a file of axes
##: SAMPLES=n  For a sweep: so many at random; for generate: texts
##: ITERS=n  For try and bench-*: iterations of each side
##: DRY_RUN=1  For defconfig-NAME: make will check, not train
##: N=9  For bench-overhead: pairs
##: CHECKS=causal,data  For check: only these
##: FAST=1  For check: leave the slow ones out
##: FULL=1  For validate-machine: the long context at full length
##: N=50 SEED=1  For randcheck: how many, and which
##: DEFCONFIG=NAME  For check: this instead of .config
##: A=RUN B=RUN  For compare: what is put side by side
##: AXIS=SYMBOL,..  For compare, verify-results: what was to differ
##: SOURCE=wandb  For verify-results: ask offline, trackio, wandb
##: LABEL_BY=FIELD,..  For compare and report: keep runs apart by it
##: FORCE=1  For reproduce: in spite of what differs
##: DATA=DIR  For reproduce: where the data is
##: DATA=require  For check: absent data is a failure
##: GPU=a10g  For check: what it has to fit; or CHECK_GPU_MEMORY_GB=24
##: JOBS=n or -jN  Runs at a time
##: PROMPT="..."  For generate: the text to go on from
##: TOKENS=n  How many tokens of a text; for bench-nsa the most
##: TEMPERATURE=x SEED=n  How they are drawn; also TOP_K=n, TOP_P=x
##: QUANT=int8  For evaluate: weights as none, int8, nf4 or fp4
##: O=DIR  .config, data and results there, not in the tree
##: KEEP_GOING=y|n  Whether a failed run stops the others
##: STALE=rerun|keep  Runs that were made by other code
##: DIRTY=y  Train code that is not committed
##: JSON=1  One JSON document on stdout
##: YES=1  Answer yes to questions
##: V=0|1|2  Short lines, full commands, why a target is remade
##: PYTHON=PATH  Use this interpreter and install nothing
##: EXTRAS="trackio ..."  For setup: optional packages of pyproject.toml
