"""The other side of server.py: starts one, asks it for cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from paths import PYTHONPATH, TESTS


class Server:
    """A warm process that runs one case at a time, in folders of its own below `root`."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        # A user's environment: no interpreter of kernels, no network, one thread (it forks).
        own = {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        own |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(root / "hub"), "PYTHONPATH": PYTHONPATH}
        self.log = (root / "server.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "hostile" / "server.py"), str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, **own},
        )

    def run(self, case_id: str) -> dict[str, Any]:
        """The row of results of one case."""
        assert self.process.stdin and self.process.stdout
        print(json.dumps(case_id), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            said = Path(self.log.name).read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the server ended in {case_id!r}: {said}")
        return json.loads(line)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        assert self.process.stdin
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.log.close()
