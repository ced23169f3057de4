"""LongTrainer stands on private methods of transformers' Trainer: they are known to exist."""

from __future__ import annotations

import errno
import importlib
import re

import pytest
import transformers
from paths import ROOT
from small_run import prepare, run
from transformers import Trainer

from longctx.train.trainer import checkpoints, step_end, trainer


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("_get_grad_norm", step_end),
        ("_run_epoch", trainer),
        ("_load_optimizer_and_scheduler", checkpoints),
    ],
)
def test_a_method_that_is_gone_is_an_error_at_import(name: str, module, monkeypatch) -> None:
    monkeypatch.delattr(Trainer, name)
    with pytest.raises(ImportError, match=f"has no Trainer.{name}, which longctx overrides"):
        importlib.reload(module)


def test_transformers_is_bounded_by_what_ci_runs() -> None:
    bounds = re.search(r'"transformers>=([\d.]+),<([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert bounds
    low, high = (tuple(map(int, bound.split("."))) for bound in bounds.groups())
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    assert low <= version < high


@pytest.mark.usefixtures("reference_kernels")
def test_a_reporter_on_a_full_disk_ends_no_run(tmp_path, monkeypatch, capsys) -> None:
    """Said once; another error of it is still an error."""
    from transformers.integrations import TensorBoardCallback

    full = OSError(errno.ENOSPC, "No space left on device")

    def on_log(self, *args, **kwargs) -> None:
        raise full

    monkeypatch.setattr(TensorBoardCallback, "on_log", on_log)
    flags = [*prepare(tmp_path), "--max_steps", "3", "--report_to", "tensorboard"]
    assert [line["step"] for line in run(flags, tmp_path / "run")] == [1, 2, 3]
    said = "TensorBoardCallback cannot write: No space left on device; training goes on without it"
    assert capsys.readouterr().out.count(said) == 1
    full = ValueError("its own fault")
    with pytest.raises(ValueError, match="its own fault"):
        run(flags, tmp_path / "again")
