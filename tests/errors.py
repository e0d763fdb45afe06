"""The error of a call that must fail."""

from collections.abc import Callable
from typing import Any

import pytest

from lib.errors import ConfigError


def error_of(call: Callable[..., object], *arguments: Any, **options: Any) -> ConfigError:
    """Return the ConfigError that the call raises with these arguments."""
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **options)
    return caught.value
