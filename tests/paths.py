"""Where things are, for tests that start other processes."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PYTHONPATH = f"{ROOT}:{TESTS}"
