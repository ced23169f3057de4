"""Every case, table by table."""

from __future__ import annotations

import importlib

from hostile.cases import Case

TABLES = (
    *("flags", "recipes", "data", "templates", "configs", "models", "checkpoints", "merges"),
    *("paths", "disks", "signals", "reports", "commands", "shells", "tasks", "documents"),
)

CASES: list[Case] = [
    case for name in TABLES for case in importlib.import_module(f"hostile.tables.{name}").CASES
]
