"""The options, the store of layer inputs and the loss of a model that was patched as any model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from longctx.cost.dims import MeasuredLayer
from longctx.cost.kept import describe, uniform
from longctx.cost.sizes import Batch, Sizes
from longctx.errors import UserError, print_rank0
from longctx.memory.ladder import Budget, Step, choose, host_bytes
from longctx.memory.levels import pending_levels
from longctx.memory.place import usable_bytes
from longctx.memory.rates import gpu_rates
from longctx.memory.store import ActivationStore, free_gpu_bytes
from longctx.runtime.costs import StepTable
from longctx.runtime.peers import as_measured, peer_backend, peer_sizes, trains_weights
from longctx.runtime.runtime import NO_RATES
from longctx.runtime.surroundings import Surroundings
from longctx.settings import PatchOptions, scored_tokens

NAME = "longctx_any"
"""The attribute of a patched model that holds its `AnyRuntime`."""


@dataclass(frozen=True, kw_only=True)
class LossFactors:
    """How a model computes its loss from logits, found by comparing its loss with ours."""

    scaling: float = 1.0
    """The number by which logits are divided."""
    cap: float | None = None
    """The bound of the divided logits: cap * tanh(logits / cap); None without one."""


@dataclass(kw_only=True)
class AnyRuntime:
    """The state of a patched model. It is no module and no buffer, so that none of it is in the
    state dict."""

    args: PatchOptions
    store: ActivationStore
    loss: LossFactors | None
    """The factors of our loss; None: the model computes its own loss, over all logits."""
    around: Surroundings = field(default_factory=Surroundings)
    reserved_tokens: int = 0
    """Tokens of the longest batch for which the store has room."""
    checkpointing: bool = True
    """Whether layers are asked to run as checkpoints; trainers may switch it off."""
    checkpoints: int = 0
    """The number of layers that ran as checkpoints in the current forward."""
    layers: Callable[[torch.dtype, torch.device, bool], tuple[MeasuredLayer, ...] | str] | None = (
        None
    )
    """Measures the cost of each layer (measured.py); None: layers are counted as Llama's."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and files of the model have the options; memory and streams are made anew."""
        return _remake, (self.args, self.store.device.type, self.loss, self.layers)

    def surround(self, **facts: Any) -> None:
        """Tells what an engine or a trainer knows, by the names of `Surroundings`."""
        self.around = replace(self.around, **facts)

    def adopt(self, tokens: int) -> None:
        """The store has room for batches of up to `tokens` tokens."""
        self.reserved_tokens = tokens

    def begin(self, model: Any, x: Tensor | None) -> None:
        """Makes room for the inputs of a batch's layers, in training. `x` are the batch's tokens,
        or their embeddings."""
        if x is None or not (model.training and torch.is_grad_enabled()):
            return
        device = next(model.parameters()).device
        if device.type != self.store.device.type:
            self.store = ActivationStore(device, self.args.host_memory_gib)
            self.reserved_tokens = 0
        tokens = x.shape[0] * x.shape[1]
        if tokens > self.reserved_tokens:
            self.reserve(model, tokens)

    def check_checkpoints(self, model: Any) -> None:
        """Ends a forward. Raises UserError if no layer ran as a checkpoint although all were asked
        to: a model's own code may call the layers' forward past transformers' checkpointing."""
        count, self.checkpoints = self.checkpoints, 0
        asked = self.checkpointing and model.training and torch.is_grad_enabled()
        if asked and not count:
            raise UserError(
                f"{type(model).__name__} runs its layers past transformers' checkpointing, so that "
                "all of their activations would be held: it trains with --class_type vanilla "
                "--gradient_checkpointing false alone"
            )

    def reserve(self, model: Any, tokens: int, host_room: int | None = None) -> None:
        """Decides where the inputs of layers wait, for batches of up to `tokens` tokens, and makes
        room for them. `host_room`: bytes that it may take of the host (default: its share of what
        is free)."""
        self.adopt(tokens)
        step, pending = self.step(model, tokens), self.around.pending_bytes(model)
        on_gpu = self.store.device.type == "cuda"
        free_bytes = usable_bytes(free_gpu_bytes(self.store.device)) if on_gpu else 0
        room = self.store.host_bytes() if host_room is None else host_room
        levels = pending_levels(step.sizes.layers, *pending, accumulates=self.around.passes > 1)
        chosen = choose(step, [levels], Budget(free_bytes, room))
        self.store.reserve(chosen.ladder, host_bytes(step, chosen), room)

    def step(self, model: Any, tokens: int) -> Step:
        """Returns the step for which it is decided where the inputs of layers wait."""
        device, dtype = self.store.device, model.dtype
        chunks = self.loss is not None
        sizes = peer_sizes(model, "any", dtype.itemsize, chunks_loss=chunks)
        batch = Batch(tokens, tokens, self.around.passes, scored_tokens(self.around.task, tokens))
        offload, given, rates = self.args.offload_activations, None, NO_RATES
        if device.type == "cuda":
            how = dtype, peer_backend(model), tokens, *sizes.scores
            rates = gpu_rates(device, *how, link_bytes=self.around.link_bytes)
            sizes = self._measured(sizes, dtype)
        else:
            cut = next(iter(sizes.cuts(tokens)))
            given = uniform(StepTable.of(cut, batch).layers, "x", offload), cut
        return Step(
            count=StepTable.of,
            sizes=sizes,
            batch=batch,
            rates=rates,
            keep="x",
            offload=offload,
            given=given,
        )

    def _measured(self, sizes: Sizes, dtype: torch.dtype) -> Sizes:
        """Returns the sizes with the measured cost of layers, and prints a line if they cannot be
        measured."""
        if self.layers is None:
            return sizes
        found = self.layers(dtype, self.store.device, trains_weights(sizes))
        if not isinstance(found, str):
            return as_measured(sizes, found)
        print_rank0(f"any: layers' memory is taken for that of Llama's of their width: {found}")
        return sizes

    def describe(self) -> str:
        """Returns a line that says where the inputs of layers wait for backward."""
        return describe(self.store.ladder, on_gpu=self.store.device.type == "cuda")


def any_runtime_of(model: Any) -> AnyRuntime | None:
    """Returns the runtime that `patch(any_model=True)` put on this model; None on another."""
    return vars(model).get(NAME)


def any_part(model: nn.Module) -> Any | None:
    """Returns the model that was patched as any model: this one, or one inside the wrappers of
    adapters or engines."""
    return next((part for part in model.modules() if any_runtime_of(part)), None)


def _remake(args: PatchOptions, device: str, loss: LossFactors | None, layers: Any) -> AnyRuntime:
    store = ActivationStore(torch.device(device), args.host_memory_gib)
    return AnyRuntime(args=args, store=store, loss=loss, layers=layers)
