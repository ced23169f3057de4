"""Exact AdamW in runs of train.py: where its states live, and who looks at the weights meanwhile,
changes no bit.

The truth of every run is the one with everything in one place (`--place gpu`), whose updates are
made at once; that those are AdamW's is tested in tests/memory.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from small_run import SendAt, add_callback, prepare, run
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, TrainerCallback

from longctx.errors import UserError
from longctx.kernels.adamw import split_master, weight_checksums
from longctx.train.commands import train
from longctx.train.output import METRICS
from longctx.train.trainer.exact import ExactTrainer
from longctx.train.trainer.trainer import LongTrainer

pytestmark = pytest.mark.usefixtures("plain_kernels")
PLACES = ["gpu", "host"]
OTHER = {"gpu": "host", "host": "gpu"}
KINDS = {
    "custom": [],
    "two batches a step": ["--gradient_accumulation_steps", "2"],
    "vanilla": ["--class_type", "vanilla"],
    "fp32": ["--dtype", "float32", "--optimizer_states", "fp32"],
}
Start = Callable[..., Path]


@pytest.fixture(scope="module")
def flags(plain_kernels, tmp_path_factory) -> list[str]:
    flags = prepare(tmp_path_factory.mktemp("small"))
    return [*flags, "--max_steps", "4", "--dtype", "bfloat16", "--lr_scheduler_type", "cosine"]


@pytest.fixture(scope="module")
def finished(flags, tmp_path_factory) -> Callable[[str, str], Path]:
    """The folder of a run of four steps of that kind and place, made when it is first asked for;
    read only."""

    @cache
    def finished(kind: str, place: str) -> Path:
        folder = tmp_path_factory.mktemp("finished") / "run"
        run(flags, folder, *KINDS[kind], "--place", place)
        return folder

    return finished


@pytest.fixture
def start(flags, tmp_path) -> Start:
    """Runs in folders of its own."""

    def start(name: str, *more: str) -> Path:
        run(flags, tmp_path / name, *more)
        return tmp_path / name

    return start


def lines(folder: Path, *keys: str) -> list[Any]:
    """What steps and evaluations logged under the keys."""
    logged = map(json.loads, (folder / METRICS).read_text().splitlines())
    shown = [line for line in logged if {"loss", "eval_loss"} & line.keys()]
    return [[line.get(key) for key in keys] for line in shown]


def assert_same(folder: Path, truth: Path, *names: str) -> None:
    """What was logged, and every tensor of the last checkpoint and of final/."""
    keys = ("step", "loss", "eval_loss", "grad_norm", "learning_rate")
    assert lines(folder, *keys) == lines(truth, *keys)
    for name in names or ("checkpoint-4", "final"):
        ours, theirs = (sorted((f / name).glob("*.safetensors")) for f in (folder, truth))
        assert [path.name for path in ours] == [path.name for path in theirs] != []
        for a, b in zip(ours, theirs, strict=True):
            assert a.read_bytes() == b.read_bytes(), f"{name}/{a.name}"
        if name != "final":
            assert_same_schedule(folder / name, truth / name)


def assert_same_schedule(checkpoint: Path, truth: Path) -> None:
    states = [torch.load(c / "scheduler.pt", weights_only=True) for c in (checkpoint, truth)]
    assert states[0] == states[1]


# --- places, and resuming ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_places_change_no_bit(finished, kind) -> None:
    host, gpu = finished(kind, "host"), finished(kind, "gpu")
    assert_same(host, gpu, "checkpoint-2", "checkpoint-4", "final")
    losses = [loss for (loss,) in lines(host, "loss")]
    assert losses[3] < losses[0] - 0.3


@pytest.mark.parametrize(
    ("kind", "place"),
    [("custom", "gpu"), *((kind, PLACES[i % 2 - 1]) for i, kind in enumerate(KINDS))],
)
def test_resumed_in_the_other_place(flags, finished, tmp_path, kind, place) -> None:
    begun = Path(shutil.copytree(finished(kind, place), tmp_path / "run"))
    resume = ["--resume_from_checkpoint", str(begun / "checkpoint-2")]
    run(flags, begun, *KINDS[kind], "--place", OTHER[place], *resume)
    assert_same(begun, finished(kind, "gpu"))


def test_a_checkpoint_holds_whole_states(finished) -> None:
    """What is read from it is what a step left: nothing waited."""
    for step in (2, 4):
        checkpoint = finished("custom", "host") / f"checkpoint-{step}"
        weights = load_file(checkpoint / "model.safetensors")
        seen = set()
        for path in sorted(checkpoint.glob("optimizer.*.safetensors")):
            states = load_file(path)
            with safe_open(path, framework="pt") as file:
                steps = json.loads(file.metadata()["longctx"])["steps"]
            for name, updates in steps.items():
                assert updates == step
                for kind, dtype in (
                    ("exp_avg", torch.float32),
                    ("exp_avg_sq", torch.float32),
                    ("remainder", torch.int16),
                ):
                    found = states.pop(f"{name}.{kind}")
                    assert found.shape == weights[name].shape and found.dtype == dtype
                checksums = weight_checksums(weights[name].flatten())
                assert torch.equal(states.pop(f"{name}.checksums"), checksums)
            assert not states
            seen |= steps.keys()
        assert seen == weights.keys()


def test_stopped_by_a_signal_and_resumed_in_the_other_place(
    flags, finished, start, tmp_path, monkeypatch
) -> None:
    add_callback(SendAt(signal.SIGTERM, 3), monkeypatch)
    with pytest.raises(SystemExit):
        start("run", "--place", "host")
    monkeypatch.undo()
    assert (tmp_path / "run" / "checkpoint-3").is_dir()
    start("run", "--place", "gpu", "--resume_from_checkpoint", "last")
    assert_same(tmp_path / "run", finished("custom", "gpu"))


def test_a_plateau_is_resumed_at_its_rate(start, eval_file, flags, tmp_path) -> None:
    """Such a schedule is no function of the step, and trusts the optimizer's states to have it."""
    falls = {"patience": 0, "threshold": 10.0, "factor": 0.5}
    plateau = ["--lr_scheduler_type", "reduce_lr_on_plateau", *EVALUATE, *eval_file]
    plateau += ["--metric_for_best_model", "eval_loss", "--lr_scheduler_kwargs", json.dumps(falls)]
    truth = start("truth", "--place", "gpu", *plateau)
    begun = Path(shutil.copytree(truth, tmp_path / "run"))
    resume = ["--resume_from_checkpoint", str(begun / "checkpoint-2")]
    run(flags, begun, "--place", "host", *plateau, *resume)
    rates = [rate for (rate,) in lines(truth, "learning_rate") if rate is not None]
    assert rates[-1] < rates[0] / 2
    assert_same(begun, truth)


def test_resuming_at_the_end_changes_nothing(finished, flags, tmp_path, capsys) -> None:
    over = Path(shutil.copytree(finished("custom", "gpu"), tmp_path / "run"))
    run(flags, over, "--place", "host", "--resume_from_checkpoint", "last")
    assert "nothing was left to train" in capsys.readouterr().out
    assert_same(over, finished("custom", "gpu"))


def test_in_bfloat16_it_is_the_default(flags, finished, start, capsys) -> None:
    folder = start("run")
    assert "states: exact fp32 AdamW, bfloat16 weights with the rest" in capsys.readouterr().out
    assert_same(folder, finished("custom", "gpu"))


def test_in_float32_torchs_states_are_the_same(start, finished) -> None:
    """Two implementations of one formula: they differ by its roundings, epsilons of an update."""
    folder = start("run", "--dtype", "float32")
    assert (folder / "checkpoint-4" / "optimizer.pt").exists()
    ours, theirs = (load_file(f / "final" / WEIGHTS) for f in (finished("fp32", "host"), folder))
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-5, atol=1e-6, msg=name)


WEIGHTS = "model.safetensors"


# --- who looks at the weights ------------------------------------------------------------------

EVALUATE = ["--eval_strategy", "steps", "--eval_steps", "1"]


@pytest.fixture
def eval_file(flags) -> list[str]:
    """A few rows: most runs evaluate after each of their steps."""
    data = Path(flags[flags.index("--train_file") + 1])
    short = data.with_name("held_out.txt")
    short.write_text((data / "3.txt").read_text()[:250])
    return ["--eval_file", str(short)]


def test_evaluation_sees_updates_and_changes_none(start, finished, eval_file) -> None:
    evaluated = {p: start(p, "--place", p, *EVALUATE, *eval_file) for p in PLACES}
    assert_same(evaluated["host"], evaluated["gpu"])
    losses = [loss for (loss,) in lines(evaluated["host"], "eval_loss") if loss is not None]
    assert len(losses) >= 4 and losses[:4] == sorted(set(losses[:4]), reverse=True)
    for name in ("checkpoint-4", "final"):
        weights = [f / name / WEIGHTS for f in (evaluated["host"], finished("custom", "gpu"))]
        assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize("more", [[], ["--save_fp32"]], ids=["bf16", "fp32"])
def test_the_best_checkpoint_comes_back_whole(start, eval_file, more) -> None:
    """The worst one of four, which is no mixture with the weights that were trained on."""
    best = ["--load_best_model_at_end", "--metric_for_best_model", "loss"]
    best += ["--greater_is_better", "true", "--save_steps", "1", "--save_total_limit", "0"]
    folder = start("run", "--place", "host", *EVALUATE, *eval_file, *best, *more)
    checkpoint = folder / "checkpoint-1"
    final = load_file(folder / "final" / WEIGHTS)
    expected = masters(checkpoint) if more else load_file(checkpoint / WEIGHTS)
    for name, weight in expected.items():
        assert torch.equal(final[name], weight), name


def masters(checkpoint: Path) -> dict[str, Tensor]:
    """A checkpoint's weights in fp32: upper halves from one file, lower ones from the others."""
    weights = load_file(checkpoint / WEIGHTS)
    found = {}
    for path in checkpoint.glob("optimizer.*.safetensors"):
        for key, remainder in load_file(path).items():
            name, _, kind = key.rpartition(".")
            if kind == "remainder":
                upper = weights[name].view(torch.int16).int() << 16
                found[name] = (upper + remainder.int()).view(torch.float32)
    assert found.keys() == weights.keys()
    return found


class StopAt(TrainerCallback):
    """Ends the training after a step, with nothing saved."""

    reads_weights = False

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs) -> None:
        control.should_training_stop = state.global_step == self.step


def test_the_best_checkpoint_gets_no_update_of_a_later_step(start, eval_file, monkeypatch) -> None:
    add_callback(StopAt(3), monkeypatch)
    best = ["--load_best_model_at_end", "--eval_strategy", "steps", "--eval_steps", "2"]
    folder = start("run", "--place", "host", *eval_file, *best)
    files = [folder / name / WEIGHTS for name in ("checkpoint-2", "final")]
    assert files[0].read_bytes() == files[1].read_bytes()


class Look(TrainerCallback):
    """Somebody else's: reads the weights in every way and at every event between two steps."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[Tensor]]] = []

    def look(self, event: str, model: nn.Module, optimizer: Any) -> None:
        self.seen.append((event, [p.detach().clone() for p in model.parameters()]))
        self.seen.append((event, [t.clone() for t in model.state_dict().values()]))
        if optimizer is not None:
            states = optimizer.state_dict()["state"].values()
            self.seen.append((event, [t.clone() for state in states for t in state.values()]))


def _looks(event: str) -> Any:
    def method(self, args, state, control, model=None, optimizer=None, **kwargs) -> None:
        self.look(f"{event} {state.global_step}", model, optimizer)

    return method


EVENTS = ["on_step_begin", "on_step_end", "on_log", "on_save", "on_evaluate", "on_train_end"]
for _event in [*EVENTS, "on_substep_end", "on_prediction_step", "on_optimizer_step"]:
    setattr(Look, _event, _looks(_event))


@pytest.mark.parametrize("kind", ["two batches a step"])
def test_callbacks_see_whole_updates_and_change_none(
    start, finished, eval_file, kind, monkeypatch
) -> None:
    looks = {}
    for place in PLACES:
        looks[place] = Look()
        with monkeypatch.context() as patch:
            add_callback(looks[place], patch)
            folder = start(place, *KINDS[kind], "--place", place, *EVALUATE, *eval_file)
        for name in ("checkpoint-4", "final"):
            weights = [f / name / WEIGHTS for f in (folder, finished(kind, "gpu"))]
            assert weights[0].read_bytes() == weights[1].read_bytes()
    ours, theirs = looks["host"].seen, looks["gpu"].seen
    assert [event for event, _ in ours] == [event for event, _ in theirs]
    assert {event.split()[0] for event, _ in ours} >= {*EVENTS}
    for (event, mine), (_, truth) in zip(ours, theirs, strict=True):
        same = [torch.equal(a, b) for a, b in zip(mine, truth, strict=True)]
        assert all(same), f"{event}: {same.count(False)} of {len(same)}"


class Outstanding(TrainerCallback):
    """Notes what waits when it is called."""

    def __init__(self, reads_weights: bool | None = None) -> None:
        self.waits: list[int] = []
        if reads_weights is not None:
            self.reads_weights = reads_weights

    def on_step_end(self, args, state, control, optimizer=None, **kwargs) -> None:
        blocks = optimizer.optimizer.stream.blocks
        self.waits.append(sum(block.update is not None or bool(block.ready) for block in blocks))


@pytest.mark.parametrize(("says", "waits"), [(None, False), (True, False), (False, True)])
def test_who_reads_no_weights_is_not_waited_for(start, monkeypatch, says, waits) -> None:
    callback = Outstanding(says)
    add_callback(callback, monkeypatch)
    monkeypatch.setattr("longctx.memory.stream.AHEAD", 0)  # of two layers one is left to wait
    start("run", "--place", "host")
    assert len(callback.waits) == 4
    assert all(bool(n) == waits for n in callback.waits)


# --- a trainer of one's own --------------------------------------------------------------------


@pytest.fixture
def make_trainer(flags, tmp_path, monkeypatch) -> Callable[..., LongTrainer]:
    """train.py's trainer, before it trains."""

    class Made(Exception):
        pass

    def make(*more: str, name: str = "run") -> LongTrainer:
        def train_later(self: LongTrainer, *args: Any, **kwargs: Any) -> None:
            raise Made(self)

        with monkeypatch.context() as patch, pytest.raises(Made) as made:
            patch.setattr(LongTrainer, "train", train_later)
            train.main([*flags, "--output_dir", str(tmp_path / name), *more])
        return made.value.args[0]

    return make


def weights_of(trainer: ExactTrainer) -> list[Tensor]:
    assert trainer.exact
    trainer.exact.flush()
    return [trainer.exact.master(p).clone() for p in trainer.model.parameters()]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert all(map(torch.equal, ours, theirs)) and len(ours) == len(theirs)


def test_two_trainings_of_one_trainer(make_trainer) -> None:
    """The second goes on with the states of the first."""
    found = {}
    for place in PLACES:
        trainer = make_trainer("--place", place, "--save_strategy", "no", name=place)
        losses, looks = [], Look()
        trainer.add_callback(looks)
        for _ in range(2):
            trainer.train()
            losses += [line["loss"] for line in trainer.state.log_history if "loss" in line]
        assert set(trainer.exact.steps.values()) == {8}
        assert [event for event, _ in looks.seen[: len(looks.seen) // 2]] * 2 == [
            event for event, _ in looks.seen
        ]
        found[place] = losses, weights_of(trainer)
    assert found["host"][0] == found["gpu"][0]
    assert found["host"][0][4] < found["host"][0][0]
    assert_equal(found["host"][1], found["gpu"][1])


def test_evaluated_before_it_is_trained(make_trainer, eval_file, finished, tmp_path) -> None:
    found = {}
    for place in PLACES:
        trainer = make_trainer("--place", place, "--save_strategy", "no", *eval_file, name=place)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        found[place] = before, trainer.evaluate()["eval_loss"]
        trainer.save_final(tmp_path / place / "final")
        weights = [f / "final" / WEIGHTS for f in (tmp_path / place, finished("custom", "gpu"))]
        assert weights[0].read_bytes() == weights[1].read_bytes()
    assert found["host"] == found["gpu"]
    assert found["host"][1] < found["host"][0]


def test_a_callback_can_be_removed_after_a_training(make_trainer) -> None:
    trainer = make_trainer("--save_strategy", "no")
    look = Look()
    trainer.add_callback(look)
    trainer.train()
    count = len(look.seen)
    trainer.remove_callback(Look)
    trainer.train()
    assert count and len(look.seen) == count


# --- steps that are not finite -----------------------------------------------------------------


class Breaks(TrainerCallback):
    """The gradient of one weight is infinite in steps of one's choice."""

    reads_weights = False

    def __init__(self, *steps: int) -> None:
        self.steps, self.now = steps, False

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        weight = model.model.layers[1].mlp.up_proj.weight
        weight.register_hook(lambda grad: grad * (torch.inf if self.now else 1))

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.now = state.global_step + 1 in self.steps


BROKEN = "is not finite: first in the gradient of model.layers.1.mlp.up_proj.weight, in the row"


@pytest.mark.parametrize("kind", ["custom", "two batches a step", "vanilla"])
def test_a_skipped_step_changes_nothing(start, monkeypatch, capsys, kind) -> None:
    add_callback(Breaks(2), monkeypatch)
    skip = ["--on_nonfinite", "skip", "--save_steps", "1", "--save_total_limit", "0"]
    ran = {p: start(p, *KINDS[kind], *skip, "--place", p) for p in PLACES}
    assert capsys.readouterr().out.count(f"step 2 {BROKEN}") == 2
    assert_same(ran["host"], ran["gpu"], *(f"checkpoint-{n}" for n in (1, 2, 3, 4)), "final")
    first, second, third = (sorted(files(ran["host"], n)) for n in (1, 2, 3))
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]
    assert all(a.read_bytes() != b.read_bytes() for a, b in zip(second, third, strict=True))


def files(folder: Path, step: int) -> list[Path]:
    return list((folder / f"checkpoint-{step}").glob("*.safetensors"))


@pytest.mark.parametrize("place", PLACES)
def test_a_broken_step_stops_before_the_weights(start, monkeypatch, tmp_path, place) -> None:
    add_callback(Breaks(3), monkeypatch)
    with pytest.raises(UserError, match=f"^step 3 {BROKEN}") as error:
        start("run", "--place", place)
    assert "\n" not in str(error.value)
    left = sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir())
    assert left == ["checkpoint-2"]


# --- options -----------------------------------------------------------------------------------


def test_a_norm_of_zero_clips_nothing(start) -> None:
    """As a limit that no gradient reaches; one that they do reach is another run."""
    ran = {
        norm: start(norm, "--place", "host", "--max_grad_norm", norm)
        for norm in ("0", "1000", "0.5")
    }
    assert_same(ran["0"], ran["1000"])
    norms = [norm for (norm,) in lines(ran["0"], "grad_norm")]
    assert min(norms) > 0.5 and norms[1:] != [n for (n,) in lines(ran["0.5"], "grad_norm")][1:]


@pytest.mark.parametrize("place", PLACES)
def test_fp32_masters_are_saved(start, finished, place) -> None:
    folder = start("run", "--place", place, "--save_fp32")
    assert_same(folder, finished("custom", "gpu"), "checkpoint-4")
    assert json.loads((folder / "checkpoint-4" / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((folder / "final" / "config.json").read_text())["dtype"] == "float32"
    ours, rounded = (load_file(f / "final" / WEIGHTS) for f in (folder, finished("custom", "gpu")))
    truth = masters(folder / "checkpoint-4")
    assert ours.keys() == rounded.keys() and "lm_head.weight" not in ours
    finer = 0
    for name, weight in ours.items():
        assert weight.dtype == torch.float32 and torch.equal(weight, truth[name])
        assert torch.equal(split_master(weight)[0], rounded[name]), name
        finer += int((weight != rounded[name].float()).sum())
    assert finer > sum(map(torch.numel, ours.values())) / 2
    model = AutoModelForCausalLM.from_pretrained(folder / "final")
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(p, ours[name]) for name, p in model.named_parameters())


def test_in_float32_masters_are_the_weights(start, finished) -> None:
    folder = start("run", *KINDS["fp32"], "--place", "host", "--save_fp32")
    assert_same(folder, finished("fp32", "gpu"))


FROZEN = {
    "the embedding": ["embed_tokens"],
    "a layer": ["layers.0"],
    "all but one matrix": ["embed_tokens", "layers.0", "norm", "self_attn", "up_proj", "gate_proj"],
}


@pytest.mark.parametrize("names", FROZEN.values(), ids=FROZEN)
def test_frozen_weights_stay(start, flags, tmp_path, monkeypatch, names) -> None:
    freeze(names, monkeypatch)
    ran = {p: start(p, "--place", p) for p in PLACES}
    assert_same(ran["host"], ran["gpu"])
    before = load_file(Path(flags[flags.index("--model_name_or_path") + 1]) / WEIGHTS)
    after = load_file(ran["host"] / "final" / WEIGHTS)
    states = [key for path in files(ran["host"], 4) for key in load_file(path)]
    for name, weight in after.items():
        frozen = any(part in name for part in names)
        assert torch.equal(weight, before[name].bfloat16()) == frozen, name
        assert (f"{name}.exp_avg" in states) != frozen, name
    resume = ["--resume_from_checkpoint", str(ran["host"] / "checkpoint-2")]
    shutil.rmtree(ran["host"] / "checkpoint-4")
    assert_same(start("host", "--place", "gpu", *resume), ran["gpu"])


def freeze(names: list[str], monkeypatch) -> None:
    """Of models that are handed to a trainer, weights with such names."""
    make = LongTrainer.__init__

    def init(self, *, model, **kwargs) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in names))
        make(self, model=model, **kwargs)

    monkeypatch.setattr(LongTrainer, "__init__", init)
