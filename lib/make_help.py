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
import sys

from lib.commands import COMMANDS, COMMON, TARGETS, VARIABLES, readers

# One column wider than the longest label, defconfig-NAME[+FRAG].
_COLUMN = 22
_NO_CONFIG = "No .config yet: make uses gpt2-quickstart; make list-defconfigs lists others"
# The number of variables in the short help.
_FEW = 5


def help_text(summary: str = "", every: bool = False) -> str:
    """Return the help, at most 80 columns wide; ``summary`` is the first line of the Run group.

    ``every`` lists all variables instead of the first ones.
    """
    lines, group = [], ""
    for name in TARGETS:
        command = COMMANDS[name]
        if command.group != group:
            group = command.group
            lines += ["", group, *([f"  {summary or _NO_CONFIG}"] if group == "Run" else [])]
        label = "defconfig-NAME[+FRAG]" if name == "defconfig" else name
        lines.append(f"  {label:<{_COLUMN}}{command.text}")
    lines += ["", "Variables"]
    variables = [variable for variable in VARIABLES.values() if variable.name.isupper()]
    for variable in variables if every else variables[:_FEW]:
        lines.append(f"  {variable.name + '=' + variable.value:<{_COLUMN}}{variable.text}")
    if not every:
        lines.append(f"  {'and':<{_COLUMN}}those of make help V=1")
    return "\n".join(lines[1:]) + "\n"


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


def _refuse(option: str, kind: str, *names: str) -> int:
    # An older Python than that of these modules can show the help.
    from lib.make_variables import require_read, unknown_names, variable_value

    if option == "--unknown":
        raise unknown_names(kind, names)
    command = COMMANDS[kind]
    require_read(command)
    for name in command.reads:
        variable_value(VARIABLES[name], os.environ.get(name, ""))
    return 0


def main(words: list[str]) -> None:
    """Print the help, or an error."""
    if words[:1] in (["--unknown"], ["--reads"]):
        from lib.console import run_main

        run_main(lambda: _refuse(*words))
    if words[:1] == ["--completion"]:
        sys.stdout.write(completion(words[1:]))
    elif words == ["--document"]:
        sys.stdout.write(document())
    else:
        every = os.environ.get("V", "") in ("1", "2")
        sys.stdout.write(help_text("".join(words).strip(), every))


if __name__ == "__main__":
    main(sys.argv[1:])
