# The targets: what they need, and "kablate TARGET" (lib/commands.py lists them and their variables).

MAKEFLAGS += --no-builtin-rules --no-builtin-variables --no-print-directory
# Only runs are parallel (make -jN is JOBS=N), never targets.
.NOTPARALLEL:
.SUFFIXES:

# The paths below are those of the tree.
ifeq ($(wildcard lib/commands.py),)
$(error not in the folder of Kablate; type: make -C "$(patsubst %/Makefile,%,$(strip $(MAKEFILE_LIST)))")
endif

# The variables that a user may set. A value is text: it is frozen here, before make could expand
# it, and passed to the commands in the environment, so that $(...) and quotes have no effect.
SETTINGS := $(shell sed -n 's/^\([A-Z][A-Z_]*\)  .*/\1/p' lib/commands.py)
freeze = $(eval override $(1) := $$(value $(1)))$(eval export $(1))
given = $(filter-out undefined,$(origin $(1)))
# A command refuses variables that it does not read, and names those of the environment. With several
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

KABLATE := $(PY) -m lib.kablate
INTO := -O $(call quote,$(BUILD))
# make -jN becomes JOBS=N of one command; make knows -j only while a recipe runs.
jobs = $(if $(JOBS),,$(patsubst -j%,JOBS=%,$(filter -j%,$(MAKEFLAGS))))
HELP = $(boot) -m lib.make_help
# For targets without a command that refuses variables; the second word is one that needs no check.
reads = $(if $(filter-out $(2),$(KABLATE_GIVEN))$(FAST),@$(HELP) --reads $(1))

# Targets that need a configuration, those that use one if there is one, and those that need none.
CONFIGURED := all data plan status watch stop slurm rerun prolong preflight report verdicts figures \
	claims verify-results export bench
OPTIONAL := check reproduce ls clean-runs audit compare evaluate generate
PLAIN := menuconfig list-defconfigs savedefconfig olddefconfig randconfig why \
	bench-nsa validate-machine
ALONE := test style setup help completion clean
TARGETS := $(CONFIGURED) $(OPTIONAL) $(PLAIN) $(ALONE)
# A goal that is no target is refused, also if it is a folder or a file; the generated files, in whose
# names may be blanks, are targets too. bash completion asks for .DEFAULT.
GOALS := $(subst $(BUILD)/config.py,config.py,$(subst $(DOTCONFIG),.config,$(MAKECMDGOALS)))
NO_TARGETS := $(filter-out $(TARGETS) defconfig-% config.py .config .DEFAULT,$(GOALS))
ifneq ($(UNKNOWN)$(NO_TARGETS),)
# Instead of the targets, also with make -n.
.PHONY: $(KABLATE_TARGET)
$(KABLATE_TARGET):
	+@$(HELP) --unknown $(if $(UNKNOWN),variable,target) $(foreach v,$(or $(UNKNOWN),$(NO_TARGETS)),$(call quote,$v))
else

.DEFAULT_GOAL := all
.PHONY: $(TARGETS)

$(CONFIGURED): $(CONFIG_PY)
	$(Q)$(jobs) $(KABLATE) $@ $(INTO)

$(OPTIONAL): setup $(ANY_CONFIG_PY)
	$(Q)$(KABLATE) $@ $(INTO)

$(PLAIN): setup
	$(Q)$(KABLATE) $@ $(INTO)

CONFIGURATIONS := $(notdir $(wildcard defconfigs/*))
DEFCONFIGS := $(patsubst %,defconfig-%,$(filter-out +%,$(CONFIGURATIONS)))
load = $(Q)$(KABLATE) defconfig $(call quote,$*) $(INTO)
# Named one by one, so that a shell can complete them; combinations match the pattern.
.PHONY: $(DEFCONFIGS) FORCE
$(DEFCONFIGS): defconfig-%: setup
	$(load)
defconfig-%: setup FORCE
	$(load)

$(call escape,$(DOTCONFIG)): | setup
	@$(if $(KCONFIG_CONFIG),,printf 'CONFIG  no %s: loading gpt2-quickstart (see make list-defconfigs)\n' \
		$(call quote,$(patsubst ./%,%,$(DOTCONFIG))) >&2)
	$(Q)SET= DRY_RUN= $(KABLATE) $(if $(KCONFIG_CONFIG),constants,defconfig gpt2-quickstart) $(INTO)

# The header of config.py names the .config that it came from. An edited config.py is refused.
CHANGED := $(shell grep -qs "$$(sha256sum 2> /dev/null < $(call quote,$(DOTCONFIG)) | cut -c -64)" \
	$(call quote,$(BUILD)/config.py) || echo FORCE)
$(CONFIG_PY): $(call escape,$(DOTCONFIG)) $(KCONFIGS) $(CHANGED) | setup
	$(Q)$(KABLATE) constants $(INTO)

test:
	$(call reads,test)
	@$(call with,$$EXTRAS $(TESTED))
	$(Q)$(PY) -m pytest$(if $(filter-out $(off),$(FAST)), --fast)

# All of them, although one fails.
style:
	$(call reads,style)
	@$(call with,$$EXTRAS dev)
	$(Q)failed=0; for tool in '-m black --check .' '-m ruff check' '-m mypy' \
		'scripts/fix_whitespace_issues.py --check' '-m pytest tests/test_architecture.py'; do \
		$(PY) $$tool || failed=1; done; exit $$failed

setup:
	$(if $(filter setup,$(MAKECMDGOALS)),$(call reads,setup,EXTRAS))
	@$(call with,$$EXTRAS)

help:
	$(call reads,help)
	@$(HELP) "$$(test ! -f $(call quote,$(DOTCONFIG)) || \
		$(KABLATE) status --one-line $(INTO) 2> /dev/null || \
		echo '.config exists: make plan lists its runs')"

completion:
	$(call reads,completion)
	@$(HELP) --completion $(CONFIGURATIONS)

clean:
	$(call reads,clean)
	$(Q)for file in config.py check.json defconfig; do rm -f $(call quote,$(BUILD))/$$file; done
	$(Q)! test -w . || rm -rf .pytest_cache \
		$$(find gpt2 lib scripts tests -name __pycache__ -prune)


endif
