"""Small models through the scheduled layers beside Hugging Face's, by the rule of exactness.py.

Truth is vanilla in fp64, or in fp32 for 16 bits, whose errors are 10,000 times those of fp32; naive
is vanilla in the dtype under test. Loss and every parameter's gradient are compared.
"""

from __future__ import annotations

import copy
import gc
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import pytest
import torch
from small_families import DECAYS
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from wide import InFp64

from exactness import DEVICE, FACTOR, FLOOR, assert_exact, relative_error
from longctx.attention.documents import Documents
from longctx.cost.kept import ORDER, Keep
from longctx.patching.patch import patch_as
from longctx.settings import PatchOptions

DEVICE = torch.device(DEVICE)


def config(**changes) -> LlamaConfig:
    defaults = {
        "vocab_size": 211,
        "hidden_size": 128,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    return LlamaConfig(**defaults | changes)


REPEATABLE = "auto" if DEVICE == "cpu" else "math"
"""The attention backend that repeats itself bit by bit: others sum dq by atomics on a GPU."""


def trio(dtype: torch.dtype, settings=None, **changes):
    """(truth, naive, ours) with the same weights, rounded to `dtype`."""
    torch.manual_seed(0)
    naive = LlamaForCausalLM(config(**changes))
    with torch.no_grad():
        for parameter in naive.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    naive = cast(naive.to(DEVICE), dtype)
    truth = truth_of(naive, dtype)
    ours = copy.deepcopy(naive)
    patch_as(ours, PatchOptions(**(settings or {})), DEVICE)
    return truth, naive, ours


def truth_of(naive: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a model that computes in `dtype`, in a far finer one."""
    return cast(copy.deepcopy(naive), finer(dtype))


def finer(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float32 else torch.float32


def cast(model: LlamaForCausalLM, dtype: torch.dtype) -> LlamaForCausalLM:
    """Like loading in `dtype`: the parameters only, and those in fp32 that transformers keeps so.
    `.to(dtype)` would round RoPE's frequencies."""
    kept = model._keep_in_fp32_modules_strict or ()
    for name, parameter in model.named_parameters():
        wide = dtype.itemsize < 4 and any(part in name for part in kept)
        parameter.data = parameter.data.to(torch.float32 if wide else dtype)
    return model


def batch(lengths: list[list[int]], seed: int = 1) -> dict[str, Tensor]:
    """One row per list of document lengths; the first third of each document is not trained."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    ids = torch.randint(211, positions.shape, generator=generator)
    labels = ids.masked_fill(positions < min(map(min, lengths)) // 3 + 1, -100)
    inputs = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {name: x.to(DEVICE) for name, x in inputs.items()} | {"use_cache": False}


def gradients(model: nn.Module, inputs) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and gradients; of a model in fp64 with all that transformers computes in fp32 in
    fp64, too, as norms and the delta rule."""
    is_wide = next(model.parameters()).dtype == torch.float64
    model.zero_grad()
    with InFp64() if is_wide else nullcontext():
        loss = model(**inputs).loss
        loss.backward()
    return loss, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


Run = tuple[Tensor, dict[str, Tensor]]
"""The losses of several batches, and every parameter's gradients, stacked."""


def run(model: nn.Module, *batches) -> Run:
    found = [gradients(model, inputs) for inputs in batches]
    for _, grads in found:
        assert (missing := [name for name in grads if grads[name] is None]) == [], missing
    losses = torch.stack([loss.detach() for loss, _ in found])
    return losses, {n: torch.stack([grads[n] for _, grads in found]) for n in found[0][1]}


def assert_exact_run(ours: Run, naive: Run, truth: Run, dtype: torch.dtype) -> None:
    """Errors are taken over all batches together: in so small a model, a bf16 gradient's error
    scatters by a tenth from batch to batch."""
    limit = FACTOR * relative_error(naive[0], truth[0]) + FLOOR[dtype]
    assert relative_error(ours[0], truth[0]) <= limit, "loss"
    assert ours[1].keys() == truth[1].keys()
    decays = [name for name in truth[1] if dtype == torch.float32 and name.endswith(DECAYS)]
    for name in truth[1].keys() - decays:
        assert_exact(name, ours[1][name], naive[1][name], truth[1][name], dtype)
    error, usual = (_mean_error(grads[1], truth[1], decays) for grads in (ours, naive))
    assert error <= 2 * usual, f"decays: mean error {error:.3g} > 2 * {usual:.3g}"


def _mean_error(grads: dict[str, Tensor], truth: dict[str, Tensor], names: Sequence[str]) -> float:
    """Returns the mean error of a mixer's decays, of which each has a few numbers, whose errors
    scatter from draw to draw."""
    return sum(relative_error(grads[name], truth[name]) for name in names) / max(1, len(names))


def assert_trains_exactly(models, *batches) -> None:
    truth, naive, ours = (run(model, *batches) for model in models)
    assert_exact_run(ours, naive, truth, models[1].dtype)


def batches(lengths: list[list[int]], count: int = 4) -> list[dict[str, Tensor]]:
    return [batch(lengths, seed) for seed in range(1, count + 1)]


PACKED = [[60, 83, 1]]
SHORT = [[26, 40, 1]]
"""Three tiles of 31 tokens, for tests that compare bits: no error of theirs needs an average."""


def packed(dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """It is bf16's errors that scatter from batch to batch: of others two will do."""
    return batches(PACKED, 4 if dtype == torch.bfloat16 else 2)


VANILLA: dict[Any, tuple[Run, Run]] = {}
"""(truth, naive) of the last two models: no setting of ours changes them, they are two thirds of a
test's time, and tests of one model in one or two dtypes follow each other."""


def assert_settings_train_exactly(trio: Callable[..., Any], *model: Any, settings, **changes):
    """The model that `trio` makes, patched with these settings, on packed rows."""
    truth, naive, ours = trio(*model, settings=settings, **changes)
    inputs, key = packed(ours.dtype), (trio, *model, *changes.items())
    if key not in VANILLA:
        VANILLA[key] = run(truth, *inputs), run(naive, *inputs)
        for old in [*VANILLA][:-2]:
            del VANILLA[old]
    true, plain = VANILLA[key]
    assert_exact_run(run(ours, *inputs), plain, true, ours.dtype)


@lru_cache(maxsize=2)
def autocast_runs(
    trio: Callable[..., Any], *model: Any, lengths: tuple[tuple[int, ...], ...], **changes: Any
) -> tuple[Run, Run]:
    """(truth, naive) under autocast, likewise."""
    _, naive, _ = trio(*model, **changes)
    inputs = batches(list(map(list, lengths)))
    return run(Autocast(naive, enabled=False), *inputs), run(Autocast(naive), *inputs)


def assert_settings_train_exactly_in_autocast(
    trio: Callable[..., Any], *model: Any, lengths: list[list[int]], settings, **changes
) -> Any:
    """The model that `trio` makes in fp32, patched with these settings, which is returned."""
    truth, naive = autocast_runs(trio, *model, lengths=tuple(map(tuple, lengths)), **changes)
    ours = trio(*model, settings=settings, **changes)[2]
    assert_exact_run(run(Autocast(ours), *batches(lengths)), naive, truth, torch.bfloat16)
    return ours


SETS_IN_ORDER = [frozenset(ORDER[:i]) for i in range(1, 6)]
OTHER_SETS = [
    frozenset({"x", "o", "q k v"}),
    frozenset({"x", "o", "h", "gate up"}),
    frozenset({"x", "o", "h", "down"}),
]
KEEPS = [
    Keep(kept, hosted)
    for kept in (*SETS_IN_ORDER, *OTHER_SETS, frozenset())
    for hosted in (frozenset(), *SETS_IN_ORDER, *OTHER_SETS)
    if hosted <= kept
]


def every_kth(k: int, layers: int, *, hosted: bool = True, last: int = 0) -> tuple[Keep, ...]:
    """A ladder in which the lowest of every k layers keeps x; the `last` ones keep x and o."""
    x, usual = frozenset({"x"}), Keep(frozenset({"x", "o"}))
    lowest, nothing = Keep(x, x if hosted else frozenset()), Keep(frozenset())
    first = tuple(nothing if i % k else lowest for i in range(layers - last))
    return first + last * (usual,)


class Autocast(nn.Module):
    """fp32 weights under bf16 autocast, as Trainer's `bf16=True`; if not `enabled`, the truth."""

    def __init__(self, model: nn.Module, enabled: bool = True) -> None:
        super().__init__()
        self.model, self.enabled = model, enabled

    def forward(self, **inputs):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.enabled):
            return self.model(**inputs)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16  # its errors'


LADDER = dict(offload_activations="all", keep="all", tile_tokens=31, attn_backend=REPEATABLE)


def any_keep(draw: random.Random) -> Keep:
    return draw.choice(KEEPS)


def in_turn(turn: int) -> list[tuple[Keep, ...]]:
    """Five ladders of three layers in which each set of activations is kept by one of them, and
    which have a third of KEEPS; three turns have them all, and begin with other layers."""
    own = KEEPS[turn % 3 :: 3]
    own += [keep for keep in (KEEPS[0], Keep(frozenset())) if keep not in own]
    own += own[: -len(own) % 3]
    third = len(own) // 3
    columns = [own[i * third : (i + 1) * third] for i in range(3)]
    return list(zip(*columns[turn % 3 :], *columns[: turn % 3], strict=True))


def assert_no_bit_depends_on_the_ladder(
    ours: LlamaForCausalLM, mixed: int, turn: int | None = None
) -> None:
    """Nor on `mixed` ladders of three layers at random. Each Keep has all layers, or, in a `turn`,
    each set that is kept has one, and a third of all Keeps are compared."""
    inputs, draw = batch(SHORT), random.Random(0)
    ours(**inputs)  # sizes the slab
    found = []
    alone = [(keep,) for keep in KEEPS]
    ladders = alone if turn is None else [alone[0], *in_turn(turn)]
    for ladder in [*ladders, *(draw.choices(KEEPS, k=3) for _ in range(mixed))]:
        ours.longctx.store.ladder = tuple(ladder)
        loss, grads = gradients(ours, inputs)
        found.append((ladder, loss.detach(), {n: g.clone() for n, g in grads.items()}))
    _, first_loss, first = found[0]
    for ladder, loss, grads in found:
        assert torch.equal(loss, first_loss), ladder
        assert [n for n in first if not torch.equal(grads[n], first[n])] == [], ladder


def assert_running_out_of_memory_leaves_nothing(
    model: Any, inputs: dict[str, Any], part: tuple[type, str], calls: int
) -> None:
    """Runs a step in which a part's method raises OutOfMemoryError after so many calls, which must
    end in backward: none of the tensors that the store keeps on the GPU outlives the graph."""
    kind, method = part
    run, left = getattr(kind, method), [calls]

    def failing(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(*args, **kwargs)

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(kind, method, failing)
        loss = model(**inputs).loss
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
    del loss
    gc.collect()
    store, tries = model.longctx.store, 1000 if DEVICE == "cuda" else 0
    # A GPU's autograd thread lets go of the node that failed a moment later.
    while store.tensors_on_gpu() and tries:
        time.sleep(0.01)
        tries -= 1
    assert store.tensors_on_gpu() == []


def separate_rows(documents: Documents) -> list[tuple[Tensor, int]]:
    """The tokens of each separate row [prompt + answer], and how many an earlier row has."""
    tokens = [torch.arange(s.start, s.stop, device=DEVICE) for s in documents.slices()]
    rows = []
    for i, parent in enumerate(documents.parents):
        first = parent is not None and parent == i - 1
        if parent is not None:
            shared = 0 if first else len(tokens[parent])
            rows.append((torch.cat([tokens[parent], tokens[i]]), shared))
        elif i not in documents.parents:
            rows.append((tokens[i], 0))
    return rows
