"""Taking secrets out of what programs print, before it is kept beside a run."""

import io
import re

import yaml

# Addresses of remotes and channels: https://TOKEN@host, ssh://user:PASSWORD@host, host/t/TOKEN/channel.
_RULES = (
    (re.compile(r"\b(https?|ftps?)://[^/\s]*@"), r"\1://"),
    (re.compile(r"://([^/\s:@]+):[^/\s]*@"), r"://\1@"),
    (re.compile(r"(://[^/\s]+/t/)[^/\s]+"), r"\1<TOKEN>"),
)
_VARIABLES = re.compile(r"^variables:", re.MULTILINE)


def without_secrets(text: str) -> str:
    """``text`` without credentials in addresses, and without the variables of a conda environment."""
    if _VARIABLES.search(text):
        document = yaml.safe_load(text)
        del document["variables"]
        text = yaml.safe_dump(document, sort_keys=False)
    for pattern, instead in _RULES:
        text = pattern.sub(instead, text)
    return text


class Redacting(io.TextIOWrapper):
    """A text stream that writes no credentials of addresses."""

    def write(self, text: str) -> int:
        """``text`` without them; its own length, as if it had been written."""
        super().write(without_secrets(text))
        return len(text)
