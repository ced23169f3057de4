"""`python -m longctx COMMAND ...`, for where the console command is not on the path."""

from __future__ import annotations

from longctx.train.cli import main

main()
