"""Removal of secrets from program output before it is stored with a run."""

import io
import re

import yaml

# URLs of remotes and channels: https://TOKEN@host, ssh://user:PASSWORD@host, host/t/TOKEN/channel.
_RULES = (
    (re.compile(r"\b(https?|ftps?)://[^/\s]*@"), r"\1://"),
    (re.compile(r"://([^/\s:@]+):[^/\s]*@"), r"://\1@"),
    (re.compile(r"(://[^/\s]+/t/)[^/\s]+"), r"\1<TOKEN>"),
)
_VARIABLES = re.compile(r"^variables:", re.MULTILINE)


def without_secrets(text: str) -> str:
    """Return ``text`` without credentials in URLs and without variables of a conda environment."""
    if _VARIABLES.search(text):
        document = yaml.safe_load(text)
        del document["variables"]
        text = yaml.safe_dump(document, sort_keys=False)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


class Redacting(io.TextIOWrapper):
    """Text stream that removes credentials from URLs."""

    def write(self, text: str) -> int:
        """Write ``text`` without credentials; return the length of the original text."""
        super().write(without_secrets(text))
        return len(text)
