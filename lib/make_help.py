"""``make help``, completion of shells, and errors for words that make does not know.

    python3 -m lib.make_help [SUMMARY]
    python3 -m lib.make_help --unknown target|variable NAME...
    python3 -m lib.make_help --reads TARGET
    python3 -m lib.make_help --completion DEFCONFIG...
    python3 -m lib.make_help --document

SUMMARY describes the configured runs; without it, the help explains how to create a configuration.
--document writes the tables of docs/configuration.md. Standard library only.
"""

from __future__ import annotations

import os
import re
import sys

from lib.commands import COMMANDS, COMMON, TARGETS, VARIABLES, readers

# One column wider than the longest label, defconfig-NAME[+FRAG].
_COLUMN = 22
_NO_CONFIG = "No .config yet: make uses gpt2-quickstart; make list-defconfigs lists others"
# The variables of the short help, and the targets that it lists by name only.
_FIRST = ("STEPS", "SEEDS", "SET", "SWEEP", "RUNS", "JOBS", "O")
_BY_NAME = (
    *("savedefconfig", "olddefconfig", "listnewconfig", "diffconfig"),
    *("bench-nsa", "validate-machine"),
)


def help_text(summary: str = "", every: bool = False) -> str:
    """Return the help, at most 80 columns wide; ``summary`` is the first line of the Run group.

    ``every`` adds the texts of targets, and the variables, that few need.
    """
    lines = []
    for group in dict.fromkeys(COMMANDS[name].group for name in TARGETS):
        names = [name for name in TARGETS if COMMANDS[name].group == group]
        shown = [name for name in names if every or name not in _BY_NAME]
        lines += [group, *([f"  {summary or _NO_CONFIG}"] if group == "Run" else [])]
        for name in shown:
            label = "defconfig-NAME[+FRAG]" if name == "defconfig" else name
            lines.append(f"  {label:<{_COLUMN}}{COMMANDS[name].text}")
        if more := [name for name in names if name not in shown]:
            lines.append(f"  {'and':<{_COLUMN}}{', '.join(more)}")
        lines.append("")
    lines.append("Variables")
    for variable in VARIABLES.values():
        if variable.name in _FIRST or (every and variable.name.isupper()):
            lines.append(f"  {variable.name + '=' + variable.value:<{_COLUMN}}{variable.text}")
    if not every:
        lines.append(f"  {'and':<{_COLUMN}}those of make help V=1, which describes everything")
    return "\n".join(lines) + "\n"


def document() -> str:
    """Return the Markdown table of the variables, with the targets that read them."""
    rows = ["| variable | meaning | read by |", "|---|---|---|"]
    for variable in VARIABLES.values():
        if variable.name.isupper():
            targets = (
                "all targets" if variable.name in COMMON else ", ".join(readers(variable.name))
            )
            value = variable.value.replace("|", "\\|")
            rows.append(f"| `{variable.name}={value}` | {variable.text} | {targets} |")
    return "\n".join(rows) + "\n"


def refuse_unknown(kind: str, names: list[str]) -> None:
    """Raise ConfigError for targets or variables that make does not have."""
    # An older Python than that of the modules can show the help, but not import them.
    from lib.errors import ConfigError, Problem, nearest
    from lib.gone import gone

    known = TARGETS if kind == "target" else [name for name in VARIABLES if name.isupper()]
    advice = "type: make help"
    if kind == "target" and names[0].startswith("defconfig"):
        advice = "type: make defconfig-NAME; make list-defconfigs lists the names"
    if kind == "variable":
        symbol = names[-1] if re.fullmatch("[A-Z][A-Z0-9_]*", names[-1]) else "NAME"
        advice += f'; a symbol of .config is set by SET="{symbol}=VALUE"'
    problems = []
    for name in names:
        if answer := gone(kind, name):
            problems.append(Problem(f"{name}: {answer}", code="usage.gone"))
            continue
        what = f"{name}: unknown {kind}{nearest(name, known)}"
        is_last = name == names[-1]
        problems.append(Problem(what, next=advice * is_last, code=f"usage.unknown-{kind}"))
    raise ConfigError(*problems)


# bash splits words at "=", so that a reply to SYM=DR is the name of a symbol alone. zsh does not, and
# cannot omit the space after a single reply. The reply to a list has its first values.
_COMPLETION = r"""# Completion of make for this tree, for bash and zsh: source <(make -s completion)
_kablate_make() {
    local typed=${COMP_LINE:0:$COMP_POINT} words= head= list= folder=
    folder=$(printf %s "$typed" | sed -nE 's/.* O=([^ ]+) .*/\1\//p')
    typed=${typed##* }
    list=${typed#*=}
    COMPREPLY=()
    [ -f lib/kablate.py ] || return 0
    case $typed in
    SYM=*|SET=*) words=$(sed -nE 's/^(# )?CONFIG_([A-Z0-9_]+)[= ].*/\2/p' "$folder.config" 2> /dev/null) ;;
    RUN=*|A=*|B=*|RUNS=*) words=$(find "${folder}results" -mindepth 2 -maxdepth 2 -name '*-s*' 2> /dev/null) ;;
    STEPS=*) words=$(sed -nE '/^\[\[step/{n;s/^name = "(.*)"/\1/p;}' gpt2/study/studies/*.toml 2> /dev/null) ;;
    CHECKS=*) words=$(sed -nE 's/^ *Check\("([a-z_]+)".*/\1/p' gpt2/check/__init__.py 2> /dev/null) ;;
    GPU=*) words=$(sed -nE 's/^ *Gpu\("([a-z0-9-]+)".*/\1/p' lib/env/gpu.py 2> /dev/null) ;;
    DEFCONFIG=*) words="@defconfigs@" ;;
    *=*) return 0 ;;
    *) words="@targets@ @variables@" ;;
    esac
    case $typed in defconfig-*+*) words=$(printf "${typed%+*}+%s " @fragments@) ;; esac
    case $typed in STEPS=*,*|CHECKS=*,*) head=${list%,*}, ;; esac
    list=${list#"$head"}
    [ -z "$ZSH_VERSION" ] || head=${typed%"$list"}
    COMPREPLY=($(compgen -P "$head" -W "$words" -- "$list"))
    case "${COMPREPLY[*]}" in *=) type compopt > /dev/null 2>&1 && compopt -o nospace ;; esac
    return 0
}
if [ -n "$ZSH_VERSION" ]; then
    type compdef > /dev/null || { autoload -Uz compinit && compinit; }
    autoload -Uz bashcompinit && bashcompinit
    complete -o default -o nospace -F _kablate_make make
else
    complete -o default -F _kablate_make make
fi
"""


def completion(defconfigs: list[str]) -> str:
    """Return a script that completes targets, variables, fragments, symbols, steps and runs.

    ``defconfigs`` are the names of defconfigs, and of fragments with a ``+`` before them.
    """
    bases = [name for name in defconfigs if name[:1] != "+"]
    targets = [name for name in TARGETS if name != "defconfig"]
    words = {
        "targets": [*targets, *(f"defconfig-{name}" for name in bases)],
        "variables": [f"{name}=" for name in VARIABLES if name.isupper()],
        "defconfigs": bases,
        "fragments": [name[1:] for name in defconfigs if name[:1] == "+"],
    }
    script = _COMPLETION
    for name, values in words.items():
        script = script.replace(f"@{name}@", " ".join(values))
    return script


def _refuse(kind: str, names: list[str]) -> int:
    if kind == "--unknown":
        refuse_unknown(names[0], names[1:])
    from lib.make_variables import require_read, variable_value

    command = COMMANDS[names[0]]
    require_read(command)
    for name in command.reads:
        variable_value(VARIABLES[name], os.environ.get(name, ""))
    return 0


def main(words: list[str]) -> int:
    """Print the help, or an error; return the exit code."""
    if words[:1] in (["--unknown"], ["--reads"]):
        from lib.console import run_main

        run_main(lambda: _refuse(words[0], words[1:]))
    if words[:1] == ["--completion"]:
        sys.stdout.write(completion(words[1:]))
    elif words == ["--document"]:
        sys.stdout.write(document())
    else:
        every = os.environ.get("V", "") in ("1", "2")
        sys.stdout.write(help_text("".join(words).strip(), every))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
