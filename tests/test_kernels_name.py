"""`kernels/` in the repository's root and Hugging Face's package `kernels`, which transformers and
TRL import by that name, do not shadow each other.

Ours has no __init__.py and is imported as longctx.kernels alone. Python takes a package with an
__init__.py before a folder without, wherever on the path either lies. tests/test_package.py has
the same question for the wheel, which holds no `kernels` beside longctx.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

pytestmark = pytest.mark.ci
ASK = """
import json
from importlib.util import find_spec
from transformers.utils.import_utils import _is_package_available, is_kernels_available
import longctx.kernels.launch
spec = find_spec("kernels")
print(json.dumps({
    "theirs": spec and spec.origin,
    "ours": longctx.kernels.launch.__file__,
    "transformers": _is_package_available("kernels", return_version=True),
    "usable": is_kernels_available(),
}))
"""


def write_kernels(folder: Path) -> Path:
    """A package `kernels` as pip installs it, too old for transformers to use; its __init__.py."""
    package, info = folder / "kernels", folder / "kernels-0.0.1.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text("def get_kernel(name): ...\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.0.1\n")
    return package / "__init__.py"


def ask(*path: Path) -> Any:
    """What a process in the repository's root finds, with these folders behind it on the path."""
    env = {**os.environ, "PYTHONPATH": ":".join(map(str, (ROOT, *path)))}
    done = subprocess.run(
        [sys.executable, "-c", ASK], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_an_installed_kernels_is_found_in_the_repositorys_root(tmp_path: Path) -> None:
    theirs = write_kernels(tmp_path)
    found = ask(tmp_path)
    assert found["theirs"] == str(theirs)
    assert found["transformers"] == [True, "0.0.1"]
    assert Path(found["ours"]).samefile(ROOT / "kernels/launch.py")


@pytest.mark.skipif(
    any((Path(p) / "kernels/__init__.py").exists() for p in sys.path), reason="kernels is installed"
)
def test_without_it_our_folder_is_not_taken_for_it() -> None:
    found = ask()
    assert found["theirs"] is None and not found["usable"]


def test_our_folder_has_no_init_file_which_would_shadow_theirs() -> None:
    assert not (ROOT / "kernels/__init__.py").exists()
