# The targets. Each runs a script of scripts/; "make help" is generated from the ## texts.

MAKEFLAGS += --no-builtin-rules --no-builtin-variables --no-print-directory
# Only runs are parallel (make -jN is JOBS=N), never targets.
.NOTPARALLEL:
.SUFFIXES:

# The variables that a user may set. A value is text: it is frozen here, before make could expand
# it, and passed to the scripts in the environment, so that $(...) and quotes have no effect.
SETTINGS := SET SYM A B STEPS SEEDS RUNS RUN OUT JOBS ON_STALE KEEP_GOING YES JSON V O EXTRAS
SETTINGS += PYTHON SWEEP SAMPLES ITERS QUANT PROMPT TOKENS TEMPERATURE TOP_K TOP_P SEED
SETTINGS += ALLOW_DIRTY COUNT CHECKS FAST DEFCONFIG DATA GPU CHECK_GPU_MEMORY_GB DRY_RUN
SETTINGS += AXIS LABEL_BY FORCE SOURCE FULL TWICE AREA CLAIMS STRICT GPUS WHERE JUNIT
SETTINGS += PROBE SUBMIT FROM
SETTINGS += NO_COLOR KCONFIG_CONFIG MENUCONFIG_STYLE
freeze = $(eval override $(1) := $$(value $(1)))$(eval export $(1))
given = $(filter-out undefined,$(origin $(1)))
# A script refuses variables that it does not read, and names those of the environment. With several
# targets, each variable may be for another one.
from = $(foreach v,$(SETTINGS),$(if $(filter $(1),$(origin $v)),$v))
export KABLATE_TARGET := $(or $(MAKECMDGOALS),all)
export KABLATE_GIVEN := $(if $(word 2,$(MAKECMDGOALS)),,$(call from,command))
export KABLATE_EXPORTED := $(call from,environment)
$(foreach v,$(SETTINGS) VIRTUAL_ENV CONDA_PREFIX,$(if $(call given,$v),$(call freeze,$v)))
# Names that begin with __ are set by bash completion.
UNKNOWN := $(filter-out __%,$(foreach v,$(.VARIABLES),$(if $(filter command,$(origin $v)),$v)))
MAKEOVERRIDES :=

# Values of a flag that is not set.
off := 0 n no false N No NO False FALSE
# With JSON=1, stdout is the document alone.
Q := $(if $(filter 1 2,$(V)),$(if $(filter-out $(off),$(JSON)),@),@)
MAKEFLAGS += $(if $(filter 2,$(V)),--trace)

# Quote a value as one word of the shell; escape it as one file name of a rule.
quote = '$(subst ','\'',$(1))'
space := $(subst ,, )
escape = $(subst :,\:,$(subst $(space),\ ,$(1)))

BUILD := $(or $(O),.)
DOTCONFIG := $(or $(KCONFIG_CONFIG),.config)
DOTCONFIG := $(if $(filter /%,$(DOTCONFIG)),,$(BUILD)/)$(DOTCONFIG)
CONFIG_PY := $(call escape,$(BUILD)/config.py)
# For the commands that do without a configuration if there is none; a named one must exist.
DOTCONFIGS := $(KCONFIG_CONFIG)$(wildcard $(call escape,$(DOTCONFIG)))
ANY_CONFIG_PY := $(if $(DEFCONFIG),,$(if $(DOTCONFIGS),$(CONFIG_PY)))
KCONFIGS := $(wildcard Kconfig gpt2/Kconfig* gpt2/*/Kconfig* gpt2/*/*/Kconfig* lib/*/Kconfig* \
	lib/*/*/Kconfig*)

# An active environment is used unchanged, and so is a .venv that make did not create. Otherwise make
# manages a .venv: the tree's or, if the tree is read-only and its .venv was not created here, one in
# the build folder. The stamp begins with its place, and lists its extras.
stamp = $(venv)/.kablate-stamp
MANAGED := $(shell test -w . || grep -qsxF $(call quote,$(CURDIR) .venv) .venv/.kablate-stamp && echo .venv)
MANAGED := $(or $(MANAGED),$(BUILD)/.venv)
venv = $(call quote,$(MANAGED))
ACTIVE := $(or $(PYTHON),$(if $(VIRTUAL_ENV),$(VIRTUAL_ENV)/bin/python))
ACTIVE := $(or $(ACTIVE),$(if $(CONDA_PREFIX),$(CONDA_PREFIX)/bin/python))
ifeq ($(ACTIVE),$(CURDIR)/.venv/bin/python)
ACTIVE :=
endif
ACTIVE := $(or $(ACTIVE),$(shell { [ -L $(venv) ] || { [ -e $(venv)/bin ] && [ ! -e $(stamp) ]; }; } \
	&& printf %s $(venv)/bin/python))
PY := $(call quote,$(or $(ACTIVE),$(MANAGED)/bin/python))
# PY, or the system's Python if PY cannot run: sufficient for setup and help.
works = $(if $(PYTHON),$(PY) -ISc '' > /dev/null 2>&1 && )command -v $(PY)
BOOT := $(shell { $(works); } || command -v python3.11 || command -v python3)
boot = $(call quote,$(or $(BOOT),$(error Python is missing: sudo apt-get install python3-venv)))
# Install the tree's packages and these extras. Milliseconds if the stamp is of this place, has the
# extras, and is younger than the files that determine the packages.
current = [ -x $(venv)/bin/python ] && for file in pyproject.toml requirements.txt constraints.txt; do \
	[ $(stamp) -nt $$file ] || exit; done && IFS=', ' && \
	for line in $(call quote,$(CURDIR) $(MANAGED)) $(1); do grep -qsxFe "$$line" $(stamp) || exit; done
with = $(if $(ACTIVE),$(boot) -m lib.env.setup --active $(call quote,$(ACTIVE)) --extras "$(1)",( \
	$(current) ) || $(boot) -m lib.env.setup --venv $(venv) --extras "$(1)")
# Of the tests, which read parquet files, log to every tracker, and plot.
TESTED := dev datasets tensorboard trackio

INTO := -O $(call quote,$(BUILD))
CONFIGURE := $(PY) scripts/configure.py
# make -jN becomes JOBS=N of one command; make knows -j only while a recipe runs.
jobs = $(if $(JOBS),,$(patsubst -j%,JOBS=%,$(filter -j%,$(MAKEFLAGS))))

refuse = $(boot) -m lib.make_help Makefile --unknown
# For targets without a script that refuses variables: those that the target reads.
reads = $(if $(filter-out $(1),$(KABLATE_GIVEN))$(FAST),@$(boot) -m lib.make_help Makefile --reads $(1))
# Of several targets, an unknown one is refused before another one starts.
TARGETS := $(if $(word 2,$(MAKECMDGOALS)),$(shell sed -n 's/^\([a-z][a-z-]*\):.*/\1/p' Makefile))
NO_TARGETS := $(if $(TARGETS),$(filter-out $(TARGETS) defconfig-%,$(MAKECMDGOALS)))
# Files, in whose names may be blanks.
NO_TARGETS := $(if $(findstring /,$(MAKECMDGOALS)),,$(NO_TARGETS))
ifneq ($(UNKNOWN)$(NO_TARGETS),)
# Instead of the targets, also with make -n.
.PHONY: $(KABLATE_TARGET)
$(KABLATE_TARGET):
	+@$(refuse) $(if $(UNKNOWN),variable,target) $(foreach v,$(or $(UNKNOWN),$(NO_TARGETS)),$(call quote,$v))
else

.DEFAULT_GOAL := all

.DEFAULT:
	+@$(refuse) target $(call quote,$@)

##@ Configure
.PHONY: menuconfig savedefconfig olddefconfig randconfig listnewconfig diffconfig list-defconfigs why
menuconfig: setup ## Edit .config in a menu
	$(Q)$(CONFIGURE) menuconfig $(INTO)

list-defconfigs: setup ## List the configurations of the tree
	$(Q)$(CONFIGURE) list-defconfigs $(INTO)

##: defconfig-NAME[+FRAG]  Load one, with fragments on top, and SET="..."
DEFCONFIGS := $(patsubst defconfigs/%,defconfig-%,$(filter-out %/fragments,$(wildcard defconfigs/*)))
dry_run = $(if $(filter 1 y yes true,$(DRY_RUN)), DRY_RUN=y,$(if \
	$(filter-out $(off),$(DRY_RUN)), DRY_RUN=$$DRY_RUN))
load = $(Q)$(CONFIGURE) defconfig $(call quote,$*) --set "$$SET$(dry_run)" $(INTO)
# Named one by one, so that a shell can complete them; combinations match the pattern.
.PHONY: $(DEFCONFIGS) FORCE
$(DEFCONFIGS): defconfig-%: setup
	$(load)
defconfig-%: setup FORCE
	$(load)

savedefconfig: setup ## Write the non-default settings to defconfig
	$(Q)$(CONFIGURE) savedefconfig $(INTO)

olddefconfig: setup ## Update an old .config to the current symbols
	$(Q)$(CONFIGURE) olddefconfig $(INTO)

randconfig: setup ## Write a random valid .config, small; SEED= repeats it
	$(Q)$(CONFIGURE) randconfig $(INTO)

listnewconfig: setup ## List the symbols that .config does not mention
	$(Q)$(CONFIGURE) listnewconfig $(INTO)

diffconfig: setup ## List the differences of A= and B= (.config.old, .config)
	$(Q)$(CONFIGURE) diffconfig $(INTO)

why: setup ## Show the source of SYM='s value, and its dependencies
	$(Q)$(CONFIGURE) why $(INTO)

$(call escape,$(DOTCONFIG)): | setup
	@$(if $(KCONFIG_CONFIG),,printf 'CONFIG  no %s: loading gpt2-quickstart (see make list-defconfigs)\n' \
		$(call quote,$(patsubst ./%,%,$(DOTCONFIG))) >&2)
	$(Q)$(CONFIGURE) $(if $(KCONFIG_CONFIG),constants,defconfig gpt2-quickstart) $(INTO)

# The header of config.py names the .config that it came from. An edited config.py is refused.
CHANGED := $(shell grep -qs "$$(sha256sum 2> /dev/null < $(call quote,$(DOTCONFIG)) | cut -c -64)" \
	$(call quote,$(BUILD)/config.py) || echo FORCE)
$(CONFIG_PY): $(call escape,$(DOTCONFIG)) $(KCONFIGS) $(CHANGED) | setup
	$(Q)$(CONFIGURE) constants $(INTO)

##@ Run
.PHONY: all data data-verify plan slurm status watch stop rerun prolong
all: $(CONFIG_PY) ## Train the runs of .config, print the table (the default)
	$(Q)$(jobs) $(PY) scripts/run_test_matrix.py $(INTO)

data: $(CONFIG_PY) ## Prepare the data set
	$(Q)$(PY) scripts/prepare_data.py $(INTO)

data-verify: $(CONFIG_PY) ## Verify every byte of the data set
	$(Q)$(PY) scripts/prepare_data.py --verify $(INTO)

plan: $(CONFIG_PY) ## List the runs and their cost; trains nothing
	$(Q)$(PY) scripts/plan.py $(INTO)

status: $(CONFIG_PY) ## Show which runs are done, running and missing
	$(Q)$(PY) scripts/status.py $(INTO)

watch: $(CONFIG_PY) ## Monitor the runs: curves, time left, alarms
	$(Q)$(PY) scripts/watch.py $(INTO)

stop: $(CONFIG_PY) ## Stop the running runs (RUNS=) and save checkpoints
	$(Q)$(PY) scripts/stop.py $(INTO)

slurm: $(CONFIG_PY) ## Print a batch script of workers; SUBMIT=y submits it
	$(Q)$(jobs) $(PY) scripts/slurm.py $(INTO)

rerun: $(CONFIG_PY) ## Train the finished runs that match RUNS= again
	$(Q)$(jobs) $(PY) scripts/rerun.py $(INTO)

prolong: $(CONFIG_PY) ## Train ITERS= more from the weights of a finished RUN=
	$(Q)$(jobs) $(PY) scripts/prolong.py $(INTO)

##@ Check
.PHONY: preflight check mutation-test reproduce test style
preflight: $(CONFIG_PY) ## Check machine and environment for .config's runs
	$(Q)$(PY) scripts/preflight_env.py $(INTO)

check: setup $(ANY_CONFIG_PY) ## Verify every step on this CPU before it costs GPU hours
	$(Q)$(PY) scripts/check.py $(INTO)

mutation-test: setup ## Plant COUNT= faults, and count those that check catches
	$(Q)$(PY) scripts/mutation_test.py $(INTO)

reproduce: setup $(ANY_CONFIG_PY) ## Train RUN= again from its directory, compare every byte
	$(Q)$(PY) scripts/reproduce.py $(INTO)

test: ## Run the tests (FAST=1: a fast part); needs the extras
	$(call reads,FAST)
	@$(call with,$$EXTRAS $(TESTED))
	$(Q)$(PY) -m pytest$(if $(filter-out $(off),$(FAST)), --fast)

# All of them, although one fails.
style: ## Check formatting, lint, types, whitespace, rules
	$(call reads)
	@$(call with,$$EXTRAS dev)
	$(Q)failed=0; for tool in '-m black --check .' '-m ruff check' '-m mypy' \
		'scripts/fix_whitespace_issues.py --check' '-m pytest tests/test_architecture.py'; do \
		$(PY) $$tool || failed=1; done; exit $$failed

##@ Evaluate
.PHONY: ls clean-runs report verdicts claims audit compare verify-results figures \
	evaluate generate export bench bench-nsa needle-test validate-machine
ls: setup $(ANY_CONFIG_PY) ## List all runs of all studies, or those WHERE=
	$(Q)$(PY) scripts/list_runs.py $(INTO)

clean-runs: setup $(ANY_CONFIG_PY) ## Remove the runs WHERE=, after a confirmation
	$(Q)$(PY) scripts/list_runs.py clean $(INTO)

report: $(CONFIG_PY) ## Write report.html, tables and the index of all studies
	$(Q)$(PY) scripts/report.py $(INTO)

verdicts: $(CONFIG_PY) ## Which steps are better, worse or equivalent, over SEEDS=
	$(Q)$(PY) scripts/verdicts.py $(INTO)

claims: $(CONFIG_PY) ## Check CLAIMS=; write LaTeX and Markdown if all hold
	$(Q)$(PY) scripts/claims.py $(INTO)

audit: setup $(ANY_CONFIG_PY) ## Check the files of RUNS=: VALID, or INVALID with reasons
	$(Q)$(PY) scripts/audit_run.py $(INTO)

compare: setup $(ANY_CONFIG_PY) ## Compare runs A= and B= (A=ra B=baseline)
	$(Q)$(PY) scripts/compare_runs.py $(INTO)

verify-results: $(CONFIG_PY) ## Check whether RUNS= may be published together
	$(Q)$(PY) scripts/verify_results.py $(INTO)

figures: $(CONFIG_PY) ## Write the figures of the report (or of RUNS=) as files
	$(Q)$(PY) scripts/draw_figures.py $(INTO)

evaluate: setup $(ANY_CONFIG_PY) ## Evaluate RUN= again; QUANT=int8 quantizes its weights
	$(Q)$(PY) scripts/evaluate.py $(INTO)

generate: setup $(ANY_CONFIG_PY) ## Generate text with the finished run RUN=, after PROMPT=
	$(Q)$(PY) scripts/generate.py $(INTO)

export: $(CONFIG_PY) ## Export RUN= to a folder that transformers can load
	$(Q)$(PY) scripts/export.py $(INTO)

bench: $(CONFIG_PY) ## Time a step beside plain GPT-2 loops; GPU=1: all tables
	$(Q)$(PY) scripts/bench.py $(INTO)

bench-nsa: setup ## Time sparse against full attention
	$(Q)$(PY) scripts/bench.py nsa $(INTO)

needle-test: setup ## Train small models on long-range retrieval
	$(Q)$(PY) scripts/needle_test.py $(INTO)

validate-machine: setup ## Validate NSA on this device (FULL=1: long contexts)
	$(Q)$(PY) scripts/validate_machine.py $(INTO)

##@ Operate
.PHONY: setup tensorboard help completion clean mrproper
setup: ## Create the Python environment; EXTRAS= adds packages
	$(if $(filter setup,$(MAKECMDGOALS)),$(call reads,EXTRAS))
	@$(call with,$$EXTRAS)

tensorboard: $(CONFIG_PY) ## Serve TensorBoard for the runs, on localhost
	$(Q)$(PY) scripts/dashboard.py $(INTO)

help: ## Show this text
	$(call reads)
	@$(boot) -m lib.make_help Makefile "$$(test ! -f $(call quote,$(DOTCONFIG)) || \
		$(PY) scripts/status.py --one-line $(INTO) 2> /dev/null || \
		echo '.config exists: make plan lists its runs')"

FRAGMENTS := $(patsubst defconfigs/fragments/%,+%,$(wildcard defconfigs/fragments/*))
completion: ## Completion of bash, zsh: source <(make -s completion)
	$(call reads)
	@$(boot) -m lib.make_help Makefile --completion $(DEFCONFIGS:defconfig-%=%) $(FRAGMENTS)

clean: ## Remove generated files; keeps .config, data and results
	$(call reads)
	$(Q)for file in config.py check.json defconfig; do rm -f $(call quote,$(BUILD))/$$file; done
	$(Q)for part in baseline test; do rm -f $(call quote,$(BUILD))/mutation-$$part.json; done
	$(Q)! test -w . || rm -rf .pytest_cache \
		$$(find gpt2 lib scripts tests -name __pycache__ -prune)

mrproper: clean ## Also remove .config, and a .venv that make created
	$(Q)for file in '' .old .origins; do rm -f $(call quote,$(DOTCONFIG))$$file; done
	$(Q)if [ -L $(venv) ]; then rm $(venv); \
		elif [ -e $(stamp) ]; then rm -rf $(venv); fi

##@ Variables
##: STEPS=0-3,ra,16  Only these steps of a study
##: SEEDS=1,2,3  Every step with each of these seeds; or SEED=7 alone
##: SEEDS=auto  More seeds until every comparison has a word
##: RUNS=PATTERN  Runs: patterns over the names of make plan, or paths
##: RUN=NAME  One run: its name in make plan, or its directory
##: WHERE="val_loss<2.5"  For ls, clean-runs: runs (= != < <= > >=)
##: CLAIMS=FILE  For claims: quoted numbers (claims.toml); OUT=DIR
##: OUT=DIR  For export: the new folder
##: SET="A=1 B=y"  Settings on top of .config, for this command only
##: GPUS=n  GPUs of each run
##: SWEEP="A=1,2 B=.."  All combinations, instead of .config; or a file of axes
##: SAMPLES=n  For a sweep: n random combinations; for generate: texts
##: ITERS=n  prolong: more iterations (COUNT= forks); bench: rounds
##: FROM=n  For prolong: iteration of a kept checkpoint
##: DRY_RUN=1  For make and defconfig-NAME: check, and train nothing
##: CHECKS=causal,data  For check: only these
##: JUNIT=FILE  For check: also write the results as JUnit XML
##: FAST=1  For check, test: skip what is slow
##: FULL=1  For validate-machine: the long context at full length
##: AREA=pruning  For mutation-test: areas, or FILE.py:LINE; COUNT=60
##: DEFCONFIG=NAME  For check, reproduce TWICE=1: instead of .config
##: TWICE=1  For reproduce: train .config (or RUN=) twice
##: A=RUN B=RUN  For compare: the two runs
##: AXIS=SYMBOL,..  For compare, verify-results: intended differences
##: SOURCE=wandb  For verify-results: local, offline, trackio or wandb
##: LABEL_BY=FIELD,..  For compare and report: separate rows by it
##: FORCE=1  For reproduce: train even if not comparable
##: DATA=DIR  For reproduce: the folder of the data
##: DATA=require  For check: missing data is a failure
##: GPU=a10g  For check: the GPU to fit; or CHECK_GPU_MEMORY_GB=24
##: GPU=h100  For plan: estimate time and memory on this GPU
##: GPU=1  For bench: all tables of docs/gpu.md, on this GPU
##: PROBE=1  For plan: time some steps of each model here
##: JOBS=n or -jN  Concurrent runs
##: SUBMIT=y  For slurm: submit the batch script
##: PROMPT="..."  For generate: the text to continue
##: TOKENS=n  Tokens to generate; of bench-nsa: the longest
##: TEMPERATURE=x SEED=n  Sampling of generate; also TOP_K=n, TOP_P=x
##: QUANT=int8  For evaluate: none, int8, nf4 or fp4
##: O=DIR  Folder of .config, data and results, instead of the tree
##: STRICT=1  Exit code 5 if a comparison is INCONCLUSIVE
##: KEEP_GOING=y|n  Whether to start more runs after a failure
##: ON_STALE=rerun|keep  Treatment of runs made by other code
##: ALLOW_DIRTY=y  Train uncommitted code
##: JSON=1  Print one JSON document
##: YES=1  Skip confirmation prompts
##: V=0|1|2  Short lines; full commands; why a target is remade
##: PYTHON=PATH  Use this interpreter, install nothing
##: EXTRAS="trackio ..."  For setup: optional packages of pyproject.toml

endif
