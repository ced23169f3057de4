"""Every script starts in a clone that is not installed, from any folder: `python X.py --help`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

pytestmark = pytest.mark.ci
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in (".", "scripts", "profiling", "profiling/bench")
    for path in (ROOT / folder).glob("*.py")
    if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
    and path.name != "unsloth_peer.py"  # which everyday_bench.py starts where Unsloth is installed
)

# One process for all of them, so that everything is imported once. For each script the path is what
# Python makes it, the script's folder before the installed packages, and what an earlier one
# imported from the repository is there only if the script itself has found the repository.
START_ALL = """
import contextlib, importlib.util, io, json, runpy, sys, traceback
from importlib.machinery import ModuleSpec

root, scripts = sys.argv[1], sys.argv[2:]
sys.meta_path = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
packages = [path for path in sys.path if path != root]
ours = ("longctx", "kernels", "profiling", "scripts")

def is_ours(name, module):
    return name.partition(".")[0] in ours

class Kept(dict):
    def find_spec(self, name, path=None, target=None):
        if name in self and root in sys.path:
            sys.modules.update(self)  # which modules of theirs may ask for by name
            return ModuleSpec(name, self)

    def create_module(self, spec):
        return self[spec.name]

    def exec_module(self, module):
        pass

ended, kept = {}, Kept()
sys.meta_path.insert(0, kept)
for script in scripts:
    for name in [name for name, module in sys.modules.items() if is_ours(name, module)]:
        kept[name] = sys.modules.pop(name)
    sys.path[:] = packages
    assert importlib.util.find_spec("longctx") is None, "longctx is installed for this process"
    sys.argv = [f"{root}/{script}", "--help"]
    sys.path.insert(0, sys.argv[0].rpartition("/")[0])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
            status = "it ended without an exit status"
        except SystemExit as end:
            status = end.code
        except BaseException:
            status = traceback.format_exc()
    ended[script] = status, printed.getvalue()
print(json.dumps(ended))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Script -> [exit status or what went wrong, what it printed]."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", START_ALL, str(ROOT), *SCRIPTS],
        cwd=tmp_path_factory.mktemp("elsewhere"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_shows_its_options(ended, script: str) -> None:
    status, printed = ended[script]
    assert status == 0, status
    assert printed.startswith(f"usage: {Path(script).name} ")


def test_all_kinds_are_among_them() -> None:
    """A moved folder would leave nothing to start."""
    known = {"train.py", "scripts/get_smollm2.py", "scripts/get_long_documents.py"}
    known |= {"profiling/profile_step.py", "profiling/phases.py", "profiling/memory_timeline.py"}
    assert known <= set(SCRIPTS)
    assert {path.name for path in (ROOT / "profiling/bench").glob("*.py")} - {
        Path(script).name for script in SCRIPTS
    } == {
        *("runner.py", "peers.py", "smollm2_steps.py", "weights_moved.py"),
        *("step_clock.py", "everyday_peers.py", "unsloth_peer.py", "efficient_ce.py"),
    }
