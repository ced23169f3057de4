"""A loss or gradient that is not a number: noticed before it reaches the weights, then explained.

Every step one number is read, the gradient norm that is computed anyway; nothing is hooked. Only
after a failure the step's rows run once more, one by one, until the first cause is found:

    weights    one is not finite: the run was broken before this step, or its files were
    forward    the first module whose output is not finite, and the document it happened in
    backward   the first parameter, in the order of backward, whose gradient is not finite (clipping
               by a norm that is not finite has overwritten the step's own gradients)

`--on_nonfinite stop` ends the run there; the last checkpoint is from before. `skip` throws the
step's gradients away, so that the optimizer leaves weights and states as they are, and goes on
with the next rows; PATIENCE steps in a row are an error all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from longctx.attention.shards import Shards
from longctx.errors import UserError, print_rank0
from longctx.families.blocks import decoder_layers
from longctx.families.vision import of_images, tower_modules
from longctx.layer.packed_weights import packed_state
from longctx.loop.collectives import any_rank, local_shard
from longctx.runtime.runtime import patched_part
from longctx.train.tasks.protocol import Task
from longctx.train.trainer.on_host import READ

PATIENCE = 10  # ten broken steps in a row are no chance: the run has diverged
SHOWN_DOCUMENTS = 8
Names = Callable[[list[int]], list[str]]
Batch = dict[str, Tensor]  # input_ids, labels, position_ids, documents: (B, S)
Loss = Callable[[nn.Module, Batch], Tensor]


class Recorded(NamedTuple):
    """The batches of a step, and their losses."""

    batches: list[Batch]
    losses: list[Tensor]


@dataclass(kw_only=True)
class NonFinite:
    """Watches the steps of one run."""

    action: Literal["stop", "skip"]
    names: Names
    """Record numbers, as rows carry them, to where the records came from."""
    steps_itself: bool = False
    """The engine's optimizer runs in backward (DeepSpeed): nothing can be skipped or run again."""
    task: Task | None = None
    """The task of the run; None for the model's own loss."""
    _in_a_row: int = 0
    _batches: list[Batch] = field(default_factory=list)
    _losses: list[Tensor] = field(default_factory=list)

    def record(self, batch: Batch | None, loss: Tensor) -> None:
        """Remembers a batch of the current step (references only) and its loss; None for one that
        accelerate has cut, which is not run again."""
        if batch is not None:
            self._batches.append(batch)
        self._losses.append(loss)

    @property
    def losses(self) -> list[Tensor]:  # () each
        """The losses of the current step's batches."""
        return self._losses

    def end_step(self) -> Recorded:
        """Returns what was recorded of the current step, and begins the next one."""
        found = Recorded(self._batches, self._losses)
        self._batches, self._losses = [], []
        return found

    def check(
        self,
        model: nn.Module,
        recorded: Recorded,
        grad_norm: Any,
        step: int,
        broken: Callable[[], str | None] | None = None,
        losses: Sequence[float] | None = None,
    ) -> bool:
        """Whether to skip a step; called when its gradients are there and not yet used, or only by
        an update that leaves weights as they are if a number is not finite. `broken` names the
        parameter whose gradient broke first, where that is known without another run; `losses` are
        those of its batches, if the host has them already.

        Every process must call it. Raises UserError for a non-finite step if the action is `stop`.
        """
        # Where the host has no numbers yet, it waits here once, for the whole backward.
        found = [*map(_number, recorded.losses)] if losses is None else losses
        numbers = [_number(grad_norm), *found]
        device = recorded.losses[0].device if recorded.losses else torch.device("cpu")
        if not any_rank(not all(map(math.isfinite, numbers)), device):
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        cause = explain(
            *(model, recorded.batches, self.names),
            again=not self.steps_itself,
            broken=broken,
            task=self.task,
        )
        line = f"step {step} is not finite: {cause}"
        if self.action == "stop":
            skip = "" if self.steps_itself else ", or skip it with --on_nonfinite skip"
            raise UserError(
                f"{line}; look at the data, lower --learning_rate{skip}; the last checkpoint is "
                "from before it"
            )
        if self._in_a_row == PATIENCE:
            raise UserError(f"{line}; so were the {PATIENCE - 1} steps before it")
        print_rank0(f"{line}; skipped")
        return True

    def check_update(self, model: Any, step: int) -> None:
        """Raises UserError if a weight is not finite after the update of `step`. Every process must
        call it."""
        found = [name for name in gather_object([broken_weight(model)]) if name]
        if found:
            raise UserError(
                f"step {step} broke the weight {found[0]}: it is not finite after the update; "
                "lower --learning_rate; earlier checkpoints are from before it"
            )


def explain(
    model: nn.Module,
    batches: Sequence[Batch],
    names: Names,
    *,
    again: bool = True,
    broken: Callable[[], str | None] | None = None,
    task: Task | None = None,
) -> str:
    """Returns where the numbers went wrong, in one line. Every process must call it; gradients are
    lost. `again`: backward may be run once more. `broken` names the first broken gradient instead.

    Processes do the same work and share each finding: a sharded model runs in all or in none.
    """
    if task is not None and task.scores:  # a batch's rows are scored together

        def loss(model: nn.Module, row: Batch) -> Tensor:
            return task.values(model, row).losses.sum()

        rows = [*batches]
    else:
        loss = _loss
        rows = [row for batch in batches for row in _apart(batch)]

    def known_gradient(
        model: nn.Module, rows: Sequence[Batch], names: Names, loss: Loss
    ) -> str | None:
        name = broken() if broken else None
        return name and f"first in the gradient of {name}, {_documents(rows, None, names)}"

    gradient = known_gradient if broken else _broken_gradient
    for look in (_broken_weight, _broken_output, *([gradient] if again else [])):
        causes = [cause for cause in gather_object([look(model, rows, names, loss)]) if cause]
        if causes:
            return causes[0]
    return f"it did not happen again {_documents(rows, None, names)}"


def _apart(batch: Batch) -> list[Batch]:
    """Returns the rows of a batch, whose positions say alone where documents begin. With images it
    stays whole, since nothing says which are whose."""
    count = len(batch["input_ids"])
    if count == 1 or of_images(batch):
        return [batch]
    of_rows = {key: tensor for key, tensor in batch.items() if key not in READ}
    return [{key: tensor[i : i + 1] for key, tensor in of_rows.items()} for i in range(count)]


def _broken_weight(model: nn.Module, *_: Any) -> str | None:
    if name := broken_weight(model):
        return f"the weight {name} was broken before it"
    name = _broken_packed_weight(model)
    return name and f"the weight {name} is not finite in the model's files: get them again"


def broken_weight(model: nn.Module) -> str | None:
    """Returns the first parameter that is not finite, as far as this process holds it."""
    # The norm, unlike isfinite, needs no memory of the weight's size.
    norms = {
        name: torch.linalg.vector_norm(shard.detach(), math.inf)
        for name, weight in model.named_parameters()
        if (shard := local_shard(weight)).numel() and shard.is_floating_point()
    }
    return next((_plain(name) for name, norm in norms.items() if not norm.isfinite()), None)


def _broken_packed_weight(model: nn.Module) -> str | None:
    """Returns the first packed weight that is not finite, as its files had it."""
    for name, weight in model.named_parameters():
        state = packed_state(weight)
        if state is not None and not state.is_finite(weight.detach()):
            return _plain(name)
    return None


def _broken_output(model: nn.Module, rows: Sequence[Batch], names: Names, loss: Loss) -> str | None:
    outputs = [(row, found) for row in rows if (found := first_nonfinite(model, row, loss))]
    if not outputs:
        return None
    row, (where, token) = outputs[0]
    return f"first in the output of {where}, {_documents([row], token, names)}"


def _broken_gradient(
    model: nn.Module, rows: Sequence[Batch], names: Names, loss: Loss
) -> str | None:
    cause = None
    for row in rows:
        model.zero_grad()
        loss(model, row).backward()
        # Backward runs from the last layer to the first, so the last broken one broke the others.
        grads = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        broken = next((name for name, grad in reversed(grads) if not _finite(grad)), None)
        if broken and cause is None:
            where = f"the gradient of {_plain(broken)}"
            cause = f"first in {where}, {_documents([row], None, names)}"
    model.zero_grad()
    return cause


def first_nonfinite(
    model: nn.Module, row: Batch, loss_of: Loss | None = None
) -> tuple[str, int | None] | None:
    """Returns the first module whose output is not finite for a row (1, S), and at which token.

    `the loss` where only that is not finite; None where all is.
    """
    found: list[tuple[int, str, int | None]] = []
    shards, (rows, tokens) = _shards(model), row["input_ids"].shape
    alone = rows == 1
    own = -(-tokens // shards.ranks) if shards else tokens
    before = shards.rank * own if shards else 0
    of_towers = tower_modules(model)

    def look(order: int, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, given: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if not found and isinstance(first, Tensor) and not _finite(first):
                token = _first_token(first, own) if alone and module not in of_towers else None
                found.append((order, name, None if token is None else token + before))

        return hook

    modules = enumerate(_called_modules(model))
    hooks = [module.register_forward_hook(look(i, name)) for i, (name, module) in modules]
    try:
        with torch.no_grad():
            loss = (loss_of or _loss)(model, row)
    finally:
        for handle in hooks:
            handle.remove()
    if shards:  # attention carries it from one to all
        everyone = [one for each in shards.gather(found) for one in each]
        found = sorted(everyone, key=itemgetter(0))
    return found[0][1:] if found else None if _finite(loss) else ("the loss", None)


def _called_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules by name, but those inside the layers of a patched model: the schedule calls none of
    them, and would not run if they had hooks."""
    patched = patched_part(model)
    layers = decoder_layers(patched) if patched and patched.longctx.args.schedules else []
    inside = {part for layer in layers for part in layer.modules() if part is not layer}
    named = [(_plain(name), module) for name, module in model.named_modules()]
    return [(name, module) for name, module in named if name and module not in inside]


def _loss(model: nn.Module, row: Batch) -> Tensor:
    """Returns the loss of this rank's tokens."""
    inputs, shards = {key: x for key, x in row.items() if key != "documents"}, _shards(model)
    loss: Tensor = model(**(shards.cut(inputs) if shards else inputs)).loss
    return loss


def _shards(model: nn.Module) -> Shards | None:
    patched = patched_part(model)
    return patched.longctx.shards if patched else None


def _first_token(output: Tensor, tokens: int) -> int | None:
    """Returns the first token with a non-finite value, in an output (1, S, *) or (S, *)."""
    per_token = output[0] if output.dim() > 2 else output
    if len(per_token) != tokens:
        return None
    finite = torch.isfinite(per_token.flatten(1)).all(1)
    return int((~finite).nonzero()[0])


def _documents(rows: Sequence[Batch], token: int | None, names: Names) -> str:
    """Returns `at token 7 of a.txt` if the token is known, else `in rows of a.txt, b.txt`."""
    if not rows:
        return "in rows that accelerate has cut"
    if not all("documents" in row for row in rows):
        return "in documents without names (--remove_unused_columns dropped them)"
    if token is not None:
        positions = rows[0]["position_ids"]
        positions = positions if positions.dim() == 2 else positions[0]
        starts = (positions[0, : token + 1] == 0).nonzero().flatten()
        number = int(rows[0]["documents"][0, len(starts) - 1])
        here = token - int(starts[-1])
        return f"at token {here} of {_names_of([number], names)[0] if number >= 0 else 'padding'}"
    numbers = [int(number) for row in rows for number in row["documents"].flatten()]
    unique = [number for number in dict.fromkeys(numbers) if number >= 0]
    more = len(unique) - SHOWN_DOCUMENTS
    shown = ", ".join(_names_of(unique[:SHOWN_DOCUMENTS], names))
    return f"in the row{'s' * (len(rows) > 1)} of {shown}" + (f" and {more} more" * (more > 0))


def _names_of(numbers: list[int], names: Names) -> list[str]:
    try:
        return names(numbers)
    except (UserError, LookupError, OSError):  # the data is gone: better than another error
        return [f"record {number}" for number in numbers]


def _plain(name: str) -> str:
    """Returns a name without what DDP and DeepSpeed put before it."""
    return name.removeprefix("module").removeprefix(".")


def _number(value: Any) -> float:
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
