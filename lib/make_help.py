"""``make help``, and errors for words that make does not know. Standard library only.

    python3 -m lib.make_help MAKEFILE [SUMMARY]
    python3 -m lib.make_help MAKEFILE --unknown target|variable NAME...
    python3 -m lib.make_help MAKEFILE --reads VARIABLE...
    python3 -m lib.make_help MAKEFILE --completion DEFCONFIG...

``target: ... ## text`` describes a target, ``##: label text`` any other entry, and ``##@ Group``
begins a group. SUMMARY describes the configured runs; without SUMMARY, the help explains how to
create a configuration.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

_GROUP = re.compile(r"##@ (?P<title>.+)")
_ENTRY = re.compile(r"(?:##: (?P<label>\S.*?)  |(?P<target>[a-z][a-z-]*):.*?## )(?P<text>.+)")
# One column wider than the longest label, defconfig-NAME[+FRAG].
_COLUMN = 22
_NO_CONFIG = "No .config yet: make uses gpt2-quickstart; make list-defconfigs lists others"


def help_text(makefile: Iterable[str], summary: str) -> str:
    """Return the help, at most 80 columns wide; ``summary`` is the first line of the Run group."""
    lines: list[str] = []
    for line in makefile:
        if group := _GROUP.match(line):
            lines += ["", group["title"]]
            if group["title"] == "Run":
                lines.append(f"  {summary or _NO_CONFIG}")
        elif entry := _ENTRY.match(line):
            label = entry["label"] or entry["target"]
            lines.append(f"  {label:<{_COLUMN}}{entry['text']}")
    return "\n".join(lines[1:]) + "\n"


def refuse_unknown(makefile: str, kind: str, names: Sequence[str]) -> NoReturn:
    """Raise ConfigError for targets or variables that the Makefile does not have."""
    # An older Python than that of the modules can show the help, but not import them.
    from lib.errors import ConfigError, Problem, nearest
    from lib.gone import gone

    known = _targets(makefile) if kind == "target" else _settings(makefile)
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
# cannot omit the space after a single reply.
_COMPLETION = r"""# Completion of make for this tree, for bash and zsh: source <(make -s completion)
_kablate_make() {
    local typed=${COMP_LINE:0:$COMP_POINT} words= head=
    typed=${typed##* }
    COMPREPLY=()
    [ -f scripts/run_test_matrix.py ] || return 0
    case $typed in
    SYM=*|SET=*) words=$(sed -nE 's/^(# )?CONFIG_([A-Z0-9_]+)[= ].*/\2/p' .config 2> /dev/null) ;;
    RUN=*|A=*|B=*|RUNS=*) words=$(find results -mindepth 2 -maxdepth 2 -name '*-s*' 2> /dev/null) ;;
    DEFCONFIG=*) words="@defconfigs@" ;;
    *=*) return 0 ;;
    *) words="@targets@ @variables@" ;;
    esac
    case $typed in defconfig-*+*) words=$(printf "${typed%+*}+%s " @fragments@) ;; esac
    [ -z "$ZSH_VERSION" ] || head=${typed%"${typed#*=}"}
    COMPREPLY=($(compgen -P "$head" -W "$words" -- "${typed#*=}"))
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


def completion(makefile: str, defconfigs: Sequence[str]) -> str:
    """Return a script that completes targets, variables, fragments, symbols and runs.

    ``defconfigs`` are the names of defconfigs, and of fragments with a ``+`` before them.
    """
    targets, settings = _targets(makefile), _settings(makefile)
    bases = [name for name in defconfigs if name[:1] != "+"]
    words = {
        "targets": [*targets, *(f"defconfig-{name}" for name in bases)],
        "variables": [f"{name}=" for name in settings],
        "defconfigs": bases,
        "fragments": [name[1:] for name in defconfigs if name[:1] == "+"],
    }
    script = _COMPLETION
    for name, values in words.items():
        script = script.replace(f"@{name}@", " ".join(values))
    return script


def _targets(makefile: str) -> list[str]:
    return re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE)


def _settings(makefile: str) -> list[str]:
    return " ".join(re.findall(r"^SETTINGS \+?:?= (.*)$", makefile, re.MULTILINE)).split()


def _refuse(makefile: str, kind: str, *names: str) -> int:
    if kind == "--unknown":
        refuse_unknown(makefile, names[0], names[1:])
    from lib.make_variables import is_set, require_read

    require_read({*names, "JSON"})
    if "FAST" in names:
        is_set("FAST")
    return 0


def main(path: str, *words: str) -> int:
    """Print the help, or an error; return the exit code."""
    with open(path, encoding="utf-8") as makefile:
        if words[:1] in (("--unknown",), ("--reads",)):
            from lib.console import run_main

            text = makefile.read()
            run_main(lambda: _refuse(text, *words))
        if words[:1] == ("--completion",):
            sys.stdout.write(completion(makefile.read(), words[1:]))
            return 0
        sys.stdout.write(help_text(makefile, "".join(words).strip()))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
