"""Out of memory: where, what holds it, what would shrink it. The error is torch's own, raised where
the test says, because a CPU has no limit to run into."""

from __future__ import annotations

import gc
import pickle
from importlib import import_module
from pathlib import Path

import pytest
import torch
from small_tokenizer import small_tokenizer

from longctx.errors import UserError
from longctx.head import loss
from longctx.head import stream as head
from longctx.layer import passes
from longctx.layer.parts import mlp
from longctx.train.commands import train
from longctx.train.trainer import oom
from longctx.train.trainer.oom import OutOfMemory

pytestmark = pytest.mark.usefixtures("reference_kernels")

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 1.31 GiB is free. Including non-PyTorch memory, this process has 138.48 GiB memory in "
    "use. Of the allocated memory 131.25 GiB is allocated by PyTorch, and 6.50 GiB is reserved by "
    "PyTorch but unallocated."
)


@pytest.fixture
def run(tmp_path: Path, tmp_path_factory, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    small_tokenizer().save_pretrained(tmp_path / "tokenizer")

    def run(*flags: str) -> str:
        """Trains until memory runs out; returns the message."""
        base = ["--preset", "tiny", "--seq_len", "64", "--max_steps", "2", "--use_cpu"]
        base += ["--train_file", str(text), "--tokenizer_name", str(tmp_path / "tokenizer")]
        base += ["--cache_dir", str(tmp_path_factory.getbasetemp() / "cache")]
        base += ["--output_dir", str(tmp_path / "run"), "--save_strategy", "no"]
        # The trial of packed rows runs layers, too, before the first step.
        monkeypatch.setattr(train, "needs_one_document", lambda *args, **options: False)
        with pytest.raises(OutOfMemory) as error:
            train.main([*base, "--disable_tqdm", "true", *flags])
        assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
        return str(error.value)

    return run


def fail(message: str = MESSAGE, at_call: int = 1):
    """A function that runs out of memory at its n-th call, and a plain one before."""

    def wrap(function):
        calls = 0

        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == at_call:
                raise torch.OutOfMemoryError(message)
            return function(*args, **kwargs)

        return call

    return wrap


@pytest.mark.parametrize(
    ("owner", "name", "class_type", "phase"),
    [
        (mlp, "swiglu_forward", "custom", "forward, MLP of a layer"),
        (mlp, "swiglu_backward_", "custom", "backward, MLP of a layer"),
        (passes, "rope_", "custom", "forward, projections of a layer"),
        (loss, "cross_entropy_forward", "custom", "forward, lm_head and loss"),
        (head, "scale_into", "custom", "backward, lm_head and loss"),
        (torch.nn.functional, "silu", "vanilla", "forward, MLP of a layer"),
        (
            torch.nn.functional,
            "scaled_dot_product_attention",
            "vanilla",
            "forward, attention of a layer",
        ),
        (torch.autograd, "_engine_run_backward", "vanilla", "backward"),
        (import_module("torch.optim.adam"), "adam", "vanilla", "optimizer"),
    ],
)
def test_the_phase_is_named(run, monkeypatch, owner, name, class_type, phase) -> None:
    monkeypatch.setattr(owner, name, fail()(getattr(owner, name)))
    message = run("--class_type", class_type)
    first = message.splitlines()[0]
    assert first == f"out of memory in step 1, {phase}: 2.50 GiB more did not fit"


def test_holders_are_counted_and_flags_would_shrink_them(run, monkeypatch) -> None:
    # In the second step, when gradients and Adam's states are there.
    monkeypatch.setattr(mlp, "swiglu_backward_", fail(at_call=6)(mlp.swiglu_backward_))
    seen: dict[str, int] = {}
    counted = oom.holders
    monkeypatch.setattr(oom, "holders", lambda t: seen.update(counted(t)) or dict(seen))
    message = run("--dtype", "float32")
    assert message.startswith("out of memory in step 2, backward, MLP of a layer")
    weights = seen["weights"]
    assert weights > 2**20
    assert seen["optimizer"] == pytest.approx(2 * weights, rel=0.01)  # Adam's two moments
    assert seen["gradients"] < weights  # the layer above and lm_head only: zero_grad drops them
    # What layers 0 to 2 keep and the one that runs: x, o (64 tokens of 128) and lse, in fp32.
    layers_bytes = [n * 64 * (128 * 2 + 4) * 4 for n in (2, 3, 4)]
    assert seen["kept activations"] in layers_bytes
    assert "131.25 GiB in use: activations and working buffers 131.2" in message
    assert "--dtype bfloat16" in message
    assert "--optimizer_states fp32 --place host" in message
    assert "--keep x" in message and "--head_groups 2" in message
    assert "expandable_segments:True" in message  # 6.5 GiB are reserved and not usable
    assert "--seq_len below 64" in message.splitlines()[-2]
    assert message.endswith("--memory_snapshot_on_oom true")


def test_advice_leaves_out_what_is_set_already(run, monkeypatch) -> None:
    monkeypatch.setattr(mlp, "swiglu_backward_", fail("CUDA out of memory.")(None))
    flags = ["--offload_activations", "all", "--keep", "x", "--head_groups", "2"]
    message = run(*flags, "--tile_tokens", "32", "--dtype", "bfloat16")
    for flag in (*flags[::2], "--tile_tokens", "--dtype", "--class_type", "expandable"):
        assert flag not in message
    assert "an allocation did not fit" in message and "by what can be counted" in message


def test_what_less_kept_would_spare_is_counted(run, monkeypatch) -> None:
    """Of --keep all: x and o are a small part, and --keep x spares more than half."""
    monkeypatch.setattr(mlp, "swiglu_backward_", fail()(mlp.swiglu_backward_))
    spared: dict[str, int] = {}
    count = oom._activations_spared
    monkeypatch.setattr(oom, "_activations_spared", lambda t: spared.update(count(t)) or spared)
    message = run("--keep", "all", "--offload_activations", "none")
    assert spared["x"] > spared["o"] > 0.6 * spared["host"] > 0
    assert "--keep o" in message and "--keep x" in message


def test_other_errors_pass(run, monkeypatch) -> None:
    def broken(*args, **kwargs):
        raise RuntimeError("not about memory")

    monkeypatch.setattr(mlp, "swiglu_forward", broken)
    with pytest.raises(RuntimeError, match="not about memory"):
        run()


def test_a_snapshot_needs_a_gpu(run, monkeypatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="--memory_snapshot_on_oom needs a GPU"):
        run("--memory_snapshot_on_oom")


@pytest.mark.gpu
def test_a_gpu_out_of_memory_leaves_a_snapshot(tmp_path: Path) -> None:
    """Real: two layers' worth of logits do not fit in what the process may use."""
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20000)
    gc.collect()
    torch.cuda.empty_cache()
    limit_bytes = torch.cuda.memory_reserved() + 2 * 2**30  # what other tests hold, and 2 GiB
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes)
    flags = ["--preset", "tiny", "--class_type", "vanilla", "--seq_len", "65536"]
    flags += ["--optimizer_states", "as_weights"]  # exact ones are refused before: they are placed
    flags += ["--max_steps", "1", "--train_file", str(text), "--save_strategy", "no"]
    flags += ["--cache_dir", str(tmp_path / "cache"), "--output_dir", str(tmp_path / "run")]
    try:
        with pytest.raises(OutOfMemory, match="out of memory in step 1, forward") as error:
            train.main([*flags, "--memory_snapshot_on_oom"])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.memory._record_memory_history(enabled=None)
    assert "--class_type custom" in str(error.value)
    assert "oom_rank0.pickle" in str(error.value)
    snapshot = pickle.loads((tmp_path / "run" / "oom_rank0.pickle").read_bytes())
    actions = {event["action"] for event in snapshot["device_traces"][0]}
    assert {"alloc", "oom"} <= actions


def test_weights_that_do_not_fit(run, monkeypatch) -> None:
    monkeypatch.setattr(train, "load_model", fail()(train.load_model))
    message = run()
    assert message.startswith("out of memory while the model is loaded: 2.50 GiB more did not fit")
    assert "--place host" in message
