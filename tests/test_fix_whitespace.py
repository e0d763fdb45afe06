"""Tests of scripts/fix_whitespace_issues.py in another repository."""

import re
import subprocess
import sys

from lib.project import ROOT

# Name → text before and after.
FILES = {
    "a.py": ("x = 1 \nif x:\n\ty = 2\n", "x = 1\nif x:\n    y = 2\n"),
    "a.md": ("a\r\n\nb\t\n\n\n", "a\n\nb\n"),
    "b.md": ("a", "a\n"),
    "Kconfig.a": ("config A\n        bool\n\thelp\n\t  a\n", "config A\n\tbool\n\thelp\n\t  a\n"),
    "Makefile": ("a:\n                b\n", "a:\n\t\tb\n"),
    "empty.md": ("", ""),
    "right.md": ("a\n\n    b\n", "a\n\n    b\n"),
}


def fix(folder, *options):
    script = [sys.executable, ROOT / "scripts" / "fix_whitespace_issues.py", *options]
    return subprocess.run(script, cwd=folder, capture_output=True, text=True, check=False)


def test_every_problem_is_listed_and_fixed(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for name, (bad, _) in FILES.items():
        (tmp_path / name).write_text(bad, newline="")
    (tmp_path / "binary").write_bytes(b"a \n\0")
    (tmp_path / "link.md").symlink_to("b.md")
    wrong = {name for name, (bad, good) in FILES.items() if bad != good}

    listed = fix(tmp_path, "--check")
    assert (listed.returncode, set(listed.stdout.split())) == (1, wrong)
    fixed = fix(tmp_path)
    assert fixed.returncode == 0 and wrong <= set(fixed.stdout.split())
    assert {name: (tmp_path / name).read_bytes().decode() for name in FILES} == {
        name: good for name, (_, good) in FILES.items()
    }
    again = fix(tmp_path, "--check")
    assert (again.returncode, again.stdout) == (0, "")
    assert (tmp_path / "binary").read_bytes() == b"a \n\0"


def test_what_the_documents_let_a_user_write_into_the_tree_is_not_touched():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    written = re.compile(r"^make .*\b(?:CUSTOM_PATH|OUT)=(\w[\w/]*)", re.MULTILINE)
    paths = {path for page in pages for path in written.findall(page.read_text())}
    assert {"texts", "models/reciprocal", "paper"} <= paths
    files = [f"{path}/a.txt" for path in sorted(paths)]
    command = ["git", "-C", str(ROOT), "check-ignore", *files]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stdout.split() == files
