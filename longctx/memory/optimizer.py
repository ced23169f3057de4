"""AdamW with exact states: fp32 master weights and moments, wherever they live.

    g = grad min(1, max_norm / |grad|)      m = b1 m + (1 - b1) g      v = b2 v + (1 - b2) g g
    p = p - lr wd p - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

AdamW: Loshchilov and Hutter 2019, arXiv 1711.05101. One step is that of torch's fp32 AdamW, for
bf16 weights too: each has a remainder, the rest of its fp32 master (kernels/adamw.py). A loop may
do with this optimizer what torch's AdamW allows; docs/states.md has a table of this.

Updates are lazy, which no other code can tell. `step` updates at once what lives on the GPU. What
lives on the host is updated just before its block's next forward, while the blocks before it
compute, with the learning rate, norm and gradients of the finished step. The values are those of an
immediate update. `flush` ends what is outstanding; any access to such a weight, gradient or state
other than through a module's forward calls it (guard.py).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from longctx.errors import print_rank0
from longctx.kernels.adamw import Options
from longctx.kernels.adamw_many import Launch, adamw_many_, prepared_adamw
from longctx.kernels.annotate import annotate
from longctx.memory.by_parameter import HoldsStates, check_options
from longctx.memory.gradients import WatchedGradients
from longctx.memory.guard import unguarded
from longctx.memory.place import Place
from longctx.memory.states import Block, BlockSpec, Slot, UpdateStep
from longctx.memory.stream import StateStream

Given = list[tuple[nn.Parameter, dict[str, Any]]]
"""The parameters with a gradient, each with its group."""


class Prepared(NamedTuple):
    """A step of parameters on the GPU that can be launched without further work on the host."""

    given: Given
    facts: list[Any]
    """The state that the step depends on (`ExactAdamW._facts`): it is launched only if it is
    unchanged."""
    places: list[Slot]
    launch: Launch
    holds: list[Any]
    """The tensors that the step reads, which stay alive until it was launched."""


class ExactAdamW(HoldsStates):
    """A torch optimizer over the blocks of a model."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        stream: StateStream,
        is_last: Callable[[], bool] = lambda: True,
    ) -> None:
        """`stream` has the blocks that hold the parameters; `is_last` says whether the batch whose
        backward runs is the step's last one (several processes average gradients then).

        Raises ValueError for a parameter that is frozen, for one in no block whose weights are not
        on the GPU, and for an option that is no number or out of its range.
        """
        self.gradients = WatchedGradients(stream, is_last=is_last)
        self._prepared: Prepared | None = None
        self._begun: Prepared | None = None
        self._strangers: list[nn.Parameter] = []
        self._said_seen = False
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        check_options(defaults)
        super().__init__(params, defaults, stream)
        mine = {p for group in self.param_groups for p in group["params"]}
        blocks = (p for block in stream.blocks for p in block.parameters)
        self._strangers = [p for p in blocks if p not in mine and isinstance(p, nn.Parameter)]

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter, trained or not, is in a block of this optimizer."""
        return any(p is parameter for block in self.stream.blocks for p in block.parameters)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch's optimizers do. The states of a parameter that is new, or that
        was frozen when the model was placed, are made on the GPU.

        Raises ValueError for a parameter that is frozen, or whose weights wait on the host without
        states, and for options that exact AdamW does not have.
        """
        check_options(param_group)
        given = param_group["params"]
        given = [given] if isinstance(given, Tensor) else list(given)
        tensors = [p[1] if isinstance(p, tuple) else p for p in given]  # (name, parameter)
        for parameter in tensors:
            self._check_new(parameter)
        super().add_param_group(param_group | {"params": given})
        for parameter in tensors:
            if parameter not in self._places:
                self._add_block(parameter)
            self.gradients.watch(parameter, self._places[parameter])
        self._strangers = [p for p in self._strangers if all(p is not q for q in tensors)]

    def _check_new(self, parameter: Any) -> None:
        """Raises ValueError for a parameter that cannot get states."""
        if not isinstance(parameter, nn.Parameter) or not parameter.requires_grad:
            shape = tuple(getattr(parameter, "shape", ()))
            raise ValueError(
                f"a parameter of {shape} is frozen: thaw it first (requires_grad_(True))"
            )
        if parameter in self._places:
            return
        block = next((b for b in self.stream.blocks if parameter in set(b.parameters)), None)
        if block is not None and block.streams:
            raise ValueError(
                f"a parameter of {tuple(parameter.shape)} was frozen when its weights were given a "
                "place on the host, which has no room for its states: make a new optimizer"
            )
        if parameter.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"exact AdamW trains bfloat16 or float32, not {parameter.dtype}")

    def _add_block(self, parameter: nn.Parameter) -> None:
        """Makes a block on the GPU for a parameter that has no states."""
        names = {p: n for b in self.stream.blocks for n, p in b.spec.parameters.items()}
        number = len(self.stream.blocks)
        name = names.get(parameter, f"added.{number}")
        block = Block(BlockSpec(name=name, parameters={name: parameter}), Place())
        block.settle(self.stream.device, lambda numel, dtype: torch.zeros(numel, dtype=dtype), None)
        self.stream.blocks.append(block)
        self._places[parameter] = block, 0

    # --- a step ------------------------------------------------------------------------------

    def clip(self, max_norm: float | None = None) -> Tensor:  # () fp32
        """Returns the norm of all gradients. The step scales them down to `max_norm`, exactly."""
        self._end_updates()
        return self.gradients.clip(max_norm)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Updates every parameter that has a gradient; what lives on the host is updated later."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        begun, self._begun = self._begun, None
        # `begin` has launched this step already.
        if begun is not None:
            self._count(begun.given, begun.places)
            self.gradients.end()
            return loss
        self._end_updates()
        self._check_strangers()
        self.gradients.settle()
        given = self._given()
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared.facts == self._facts(given):
            prepared.launch(None)
            self._count(given, prepared.places)
            self.gradients.end()
            return loss
        places = [self._checked_place(parameter) for parameter, _ in given]
        seen = self.gradients.are_seen() or any(block.is_lent() for block in self.stream.blocks)
        self._update(given, places)
        self.gradients.end()
        self.stream.begin_updates()
        if seen:
            self._end_seen_updates()
        return loss

    def _given(self) -> Given:
        return [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]

    @torch.no_grad()
    def prepare(self) -> None:
        """Prepares the next step while the GPU is still busy: all that needs no new numbers. If
        nothing changes until then, the step only launches a kernel. Does nothing where states wait
        on the host."""
        self._prepared = None
        given = self._given()
        places = [self._checked_place(parameter) for parameter, _ in given]
        if not all(block.place.all_on_gpu for block in self.stream.blocks):
            return
        facts = self._facts(given)
        rows = self._rows(given, places, [block.next_count(i) for block, i in places])
        columns = [*zip(*rows, strict=True)] or [()] * 5
        launch = prepared_adamw(*columns)
        self._prepared = Prepared(given, facts, places, launch, rows)

    @torch.no_grad()
    def begin(self, guard: Tensor) -> None:  # () fp32
        """Launches the next step before the host knows whether its gradients are finite: the GPU
        updates nothing unless `guard` is 0. `step` then counts the update, or `zero_grad` forgets
        it. Until then the caller must keep weights, gradients, states and options from changing.
        Does nothing where states wait on the host."""
        self._check_strangers()
        self.prepare()
        self._begun, self._prepared = self._prepared, None
        if self._begun is not None:
            with annotate("optimizer"):
                self._begun.launch(guard)

    @property
    def has_begun(self) -> bool:
        """Whether the update of the next step was launched (`begin`)."""
        return self._begun is not None

    @property
    def can_begin(self) -> bool:
        """Whether no hook asks to be called before or after its steps."""
        before = (self._optimizer_step_pre_hooks, _global_optimizer_pre_hooks)
        after = (self._optimizer_step_post_hooks, _global_optimizer_post_hooks)
        return not any(before) and not any(after)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._begun = self._prepared = None
        self.gradients.forget_order()
        super().zero_grad(set_to_none)

    def _facts(self, given: Given) -> list[Any]:
        """Returns all that a prepared step depends on: where weights and gradients are, the
        versions of the gradients, the options of groups, and the counts of steps."""
        here = [
            (id(p), p.data_ptr(), id(g), g.data_ptr(), g._version)
            for p, _ in given
            if (g := p.grad) is not None
        ]
        groups = [_options(group, 0) for group in self.param_groups]
        return [here, groups, [block.counts.tolist() for block in self.stream.blocks]]

    def _end_seen_updates(self) -> None:
        """Ends outstanding updates, since other code holds a view that would show they are late."""
        if not self._said_seen and any(b.update is not None for b in self.stream.blocks):
            self._said_seen = True
            print_rank0(
                "updates end within optimizer.step, not while the next forward runs: a view of a "
                "weight, gradient or state is kept (parameter.data, a state dict)"
            )
        self.stream.flush()

    def _checked_place(self, parameter: nn.Parameter) -> Slot:
        """Returns the parameter's block and its number there. Raises UserError for a parameter
        without states, and ValueError for one that has changed since they were made."""
        block, i = place = self._place(parameter)
        if parameter.dtype is not block.dtypes[i] or parameter.numel() != block.numels[i]:
            raise ValueError(
                f"a parameter is now {tuple(parameter.shape)} in {parameter.dtype}, its states are "
                f"of {block.numels[i]} numbers in {block.dtypes[i]}: make a new optimizer for this "
                "model"
            )
        return place

    def _update(self, given: Given, places: Sequence[Slot]) -> None:
        """Updates the parameters whose block is on the GPU, all in one launch, and notes the steps
        of the others. Options are those that the groups have now."""
        rows = self._rows(given, places, self._count(given, places))
        late = [(p, row) for p, row in zip(places, rows, strict=True) if not p[0].place.all_on_gpu]
        for place, (_, _, grad, options, scale) in late:
            self._outstand(place, grad, options, scale)
        now = [row for place, row in zip(places, rows, strict=True) if place[0].place.all_on_gpu]
        if now:
            with annotate("optimizer"):
                adamw_many_(*zip(*now, strict=True))

    def _count(self, given: Given, places: Sequence[Slot]) -> list[int]:
        """Counts an update of each parameter, and returns the new counts."""
        for (parameter, _), (block, i) in zip(given, places, strict=True):
            if parameter not in self.counts:
                self.counts[parameter] = block.counts[i]
        return [block.count(i) for block, i in places]

    def _rows(
        self,
        given: Given,
        places: Sequence[Slot],
        counts: Sequence[int],
    ) -> list[tuple[Any, ...]]:
        """Returns the arguments of `adamw_many_` for each parameter, without states for one that is
        updated later."""
        made: dict[tuple[int, int], Options] = {}
        rows = []
        for (parameter, group), place, count in zip(given, places, counts, strict=True):
            grad, scale = self.gradients.take(place)
            which = id(group), count
            if (options := made.get(which)) is None:
                options = made[which] = _options(group, count)
            block, i = place
            states = block.whole_states(i) if block.place.all_on_gpu else None
            rows.append((parameter, states, grad, options, scale))
        return rows

    def _outstand(
        self, place: Slot, grad: Tensor | None, options: Options, scale: Tensor | None
    ) -> None:
        """Notes a step that is made later."""
        block, i = place
        shown = block.parameters[i].grad
        assert shown is not None
        if grad is shown:  # the shown one is guarded from now on; the update reads another
            with unguarded():
                grad = grad.detach()
        block.update = (block.update or {}) | {
            i: UpdateStep(grad=grad, options=options, scale=scale)
        }
        block.shown.append(shown)
        block.close(self.stream.settle)

    def _check_strangers(self) -> None:
        """Warns of gradients that belong to no group. torch's AdamW would ignore them, too, but it
        was given its parameters by name."""
        found = sum(p.grad is not None and p.requires_grad for p in self._strangers)
        if found:
            self._strangers = []
            warnings.warn(
                f"{found} parameters of the model have gradients and are in no group of the exact "
                "AdamW: they were thawed after it was made. To train them: "
                "optimizer.add_param_group({'params': [...]})",
                stacklevel=3,
            )

    def _end_updates(self) -> None:
        if any(block.update is not None for block in self.stream.blocks):
            self.stream.flush()

    def broken_gradient(self) -> str | None:
        """Returns the name of the first parameter, in the order of backward, whose gradient is not
        finite; None if all are."""
        place = self.gradients.broken()
        if place is None:
            return None
        block, i = place
        names = {parameter: name for name, parameter in block.spec.parameters.items()}
        return names[block.parameters[i]]

    def __del__(self) -> None:
        """Ends outstanding updates, so that the weights of a model are updated when its optimizer
        is dropped."""
        stream = vars(self).get("stream")
        if sys is None:  # modules are taken apart: the interpreter ends
            return
        if stream is not None and not sys.is_finalizing():
            if any(block.update is not None for block in stream.blocks):
                stream.flush()

    def __getstate__(self) -> Any:
        raise TypeError("an exact AdamW is not copied or saved itself: save optimizer.state_dict()")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__getstate__()


def _options(group: Mapping[str, Any], step: int) -> Options:
    beta1, beta2 = group["betas"]
    return Options(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        step=step,
    )
