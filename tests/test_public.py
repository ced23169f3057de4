"""The public door: every name is there, and nothing heavy is loaded before one is used."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from paths import PYTHONPATH

import longctx


@pytest.mark.parametrize("name", longctx.__all__)
def test_every_public_name_is_there_and_explained(name: str) -> None:
    thing = getattr(longctx, name)
    assert thing.__name__.removeprefix("longctx.") == name and thing.__doc__
    assert name in dir(longctx)


@pytest.mark.parametrize("name", longctx.losses.__all__)
def test_every_loss_is_there_and_explained(name: str) -> None:
    thing = getattr(longctx.losses, name)
    assert thing.__name__ == name and thing.__doc__
    assert name in (longctx.losses.__doc__ or "")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'patsch'"):
        _ = longctx.patsch


def test_importing_longctx_loads_nothing_heavy() -> None:
    code = "import sys, longctx; print({'torch', 'transformers', 'triton'} & set(sys.modules))"
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout == "set()\n", done.stderr
