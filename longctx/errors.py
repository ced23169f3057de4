"""The error for bad input, apart from config.py so that commands can raise it without torch."""

from __future__ import annotations


class UserError(Exception):
    """Bad input. The message is one line that names what is wrong and what to do."""
