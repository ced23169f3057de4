"""What exact states cannot be together with is one line, before data is read or a file touched."""

from __future__ import annotations

import pytest
import torch
from small_run import prepare, run

from longctx.constants import GIB
from longctx.errors import UserError
from longctx.loop import states
from longctx.train.engines.deepspeed import DeepSpeed
from longctx.train.engines.fsdp import FSDP2
from longctx.train.options.config import TrainArguments
from longctx.train.options.exact_states import uses_exact_states
from longctx.train.output import METRICS
from longctx.train.start import options

pytestmark = pytest.mark.usefixtures("reference_kernels")


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    return [*prepare(tmp_path_factory.mktemp("small")), "--max_steps", "2"]


HALF = "--dtype bfloat16"
MASTERLESS = "leave out --optimizer_states as_weights"
ADAMW = "are for AdamW in bfloat16 or float32: leave out --optim, --optim_args and --fp16"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (f"{HALF} --optimizer_states as_weights --place host", MASTERLESS),
        (f"{HALF} --optimizer_states as_weights --save_fp32", MASTERLESS),
        ("--optimizer_states as_weights --save_fp32", MASTERLESS),
        ("--optimizer_states as_weights --place host --fp16", MASTERLESS),
        ("--optim adafactor --place host", ADAMW),
        (f"{HALF} --optim adafactor --place host", ADAMW),
        (f"{HALF} --optim sgd --optimizer_states fp32", ADAMW),
        (f"{HALF} --optim sgd --save_fp32", ADAMW),
        (f"{HALF} --optim adamw_torch_4bit --gpu_memory_gib 1", ADAMW),
        ("--fp16 --place host", ADAMW),
        ("--fp16 --optimizer_states fp32", ADAMW),
        ("--optimizer_states fp16", "invalid choice: 'fp16'"),
        ("--place disk", "invalid choice: 'disk'"),
        ("--gpu_memory_gib 0", "--gpu_memory_gib must be above 0"),
        ("--gpu_memory_gib nan", "--gpu_memory_gib must be a number"),
        ("--save_fp32 maybe", "--save_fp32"),
    ],
)
def test_impossible_options(flags, tmp_path, monkeypatch, words, says) -> None:
    def too_late(*args, **kwargs):
        raise AssertionError("data is read")

    monkeypatch.setattr("longctx.train.commands.train.build_dataset", too_late)
    monkeypatch.setattr(options, "rehearse", lambda args, steps: None)  # CPUs have no fp16, ...
    with pytest.raises((UserError, SystemExit)) as error:
        run(flags, tmp_path / "run", *words.split())
    if isinstance(error.value, UserError):
        assert says in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_an_earlier_run_is_not_overwritten_in_vain(flags, tmp_path) -> None:
    folder = tmp_path / "run"
    run(flags, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=MASTERLESS):
        wrong = ["--optimizer_states", "as_weights", "--place", "host"]
        run(flags, folder, *wrong, "--overwrite_output_dir")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("kind", ["sgd", "float32", "fp16"])
def test_who_asks_for_nothing_trains_as_before(kind, tmp_path, monkeypatch) -> None:
    args = TrainArguments(output_dir=str(tmp_path), use_cpu=True, save_fp32=kind == "float32")
    args.optim, args.fp16 = ("sgd" if kind == "sgd" else args.optim), kind == "fp16"
    dtype = torch.bfloat16 if kind == "sgd" else torch.float32
    assert not uses_exact_states(args, dtype)


@pytest.mark.parametrize("engine", [DeepSpeed, FSDP2])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("optimizer_states", "fp32"),
        ("optimizer_states", "as_weights"),
        ("place", "host"),
        ("place", "gpu"),
        ("gpu_memory_gib", 4.0),
        ("save_fp32", True),
    ],
)
def test_engines_keep_states_themselves(engine, option, value, tmp_path) -> None:
    args = TrainArguments(output_dir=str(tmp_path), use_cpu=True, **{option: value})
    says = f"^--{option}: {engine.name} keeps fp32 states itself.* run without an engine$"
    with pytest.raises(UserError, match=says):
        engine().start(args)


TOO_LITTLE = "^0.0 GiB of host memory are needed for states and activations and 0.0 GiB may be used"


@pytest.mark.parametrize(
    ("class_type", "resumed"), [("custom", False), ("custom", True), ("vanilla", False)]
)
def test_too_little_host_memory(flags, tmp_path, class_type, resumed) -> None:
    """Told before the first step, whoever's layers run; what was trained before is there."""
    folder = tmp_path / "run"
    words = ["--dtype", "bfloat16", "--place", "host", "--class_type", class_type]
    if resumed:
        run(flags, folder, *words)
    before = sorted(path.name for path in folder.glob("checkpoint-*"))
    with pytest.raises(UserError, match=TOO_LITTLE) as error:
        resume = ["--resume_from_checkpoint", "last"] if resumed else []
        run(flags, folder, *words, *resume, "--max_steps", "4", "--host_memory_gib", "0.0001")
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == before
    assert resumed or not (folder / METRICS).exists()


def test_a_gpu_that_is_too_small_is_one_line(flags, tmp_path, monkeypatch) -> None:
    small = int(0.0001 * GIB)
    monkeypatch.setattr(states, "_gpu_budget", lambda model, args: small)
    with pytest.raises(UserError, match="GiB of GPU memory are needed at least and 0.0") as error:
        run(flags, tmp_path / "run", "--dtype", "bfloat16")
    assert "\n" not in str(error.value) and "--gpu_memory_gib" in str(error.value)
