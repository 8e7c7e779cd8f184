"""The families of errors of docs/errors.md, those that the extension throws."""
from __future__ import annotations

from typing import NoReturn

from ._native.isograd_comm import ConfigError, PeerError

__all__ = ["ConfigError", "PeerError", "refuse"]


def refuse(where: str, found: str, expected: str, action: str) -> NoReturn:
    """Raises a ConfigError in its three parts: what was found, what was expected, what to do."""
    raise ConfigError(f"{where}: found {found}; expected {expected}. {action}.")
