"""An exact AdamW's states and options by parameter, as torch's optimizers have them: `state`,
`state_dict`, `load_state_dict`.

`optimizer.state[parameter]` holds `step`, `exp_avg`, `exp_avg_sq` and, for weights in 16 bits,
`remainder` and `checksums`. They are the states themselves where they live: the next update reads
what is written into them, and a kept one shows every update. They cannot be replaced by other
tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from longctx.errors import UserError
from longctx.kernels.adamw import join_master, weight_checksums
from longctx.memory.states import Slot
from longctx.memory.stream import StateStream

STATES = ("exp_avg", "exp_avg_sq", "remainder", "checksums")
OPTIONS = ("lr", "betas", "eps", "weight_decay")


class StatesByParameter(MutableMapping[nn.Parameter, "StatesOf"]):
    """The states of all parameters that were updated, as views of where they live."""

    def __init__(self, optimizer: HoldsStates) -> None:
        self._optimizer = weakref.ref(optimizer)

    @property
    def optimizer(self) -> HoldsStates:
        found = self._optimizer()
        assert found is not None, "its optimizer is gone"
        return found

    def __getitem__(self, parameter: nn.Parameter) -> StatesOf:
        optimizer = self.optimizer
        if parameter not in optimizer.counts:
            return StatesOf({})  # torch's is a defaultdict
        return StatesOf({"step": optimizer.counts[parameter]} | optimizer.lend_states(parameter))

    def __setitem__(self, parameter: nn.Parameter, states: Mapping[str, Any]) -> None:
        self.optimizer.load_states(parameter, states)

    def __delitem__(self, parameter: nn.Parameter) -> None:
        if parameter not in self.optimizer.counts:
            raise KeyError(parameter)
        self.optimizer.load_states(parameter, {})

    def __contains__(self, parameter: object) -> bool:
        return parameter in self.optimizer.counts

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter([*self.optimizer.counts])

    def __len__(self) -> int:
        return len(self.optimizer.counts)


class StatesOf(MutableMapping[str, Tensor]):
    """One parameter's states by name. Their values may be written, the mapping may not."""

    def __init__(self, states: dict[str, Tensor]) -> None:
        self._states = states

    def __getitem__(self, name: str) -> Tensor:
        return self._states[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if value is not None and value is self._states.get(name):
            return  # states["exp_avg"] *= 0.5 has written into it
        raise UserError(
            f"exact AdamW's state {name!r} of a parameter lives in a place of its own, which no "
            "other tensor takes: write into it (state['exp_avg'].copy_(x)), or give all of a "
            "parameter's states to optimizer.load_states(parameter, states)"
        )

    def __delitem__(self, name: str) -> None:
        self[name] = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        return repr(self._states)


class HoldsStates(torch.optim.Optimizer):
    """A torch optimizer whose states are those of a model's blocks (states.py)."""

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], stream: StateStream
    ) -> None:
        self.stream = stream
        self.counts: dict[nn.Parameter, Tensor] = {}
        """The number of updates of each parameter, fp32, (), on the CPU, as torch's `step`: a view
        of its block's."""
        self._states = StatesByParameter(self)
        self._places = {
            parameter: (block, i)
            for block in stream.blocks
            for i, parameter in enumerate(block.parameters[: len(block.ranges)])
        }
        super().__init__(params, defaults)

    @property
    def steps(self) -> dict[nn.Parameter, int]:
        """The number of updates of each parameter."""
        return {parameter: int(count) for parameter, count in self.counts.items()}

    def flush(self) -> None:
        """Ends every outstanding update: weights and states may be read, wherever they are."""
        self.stream.flush()

    def _place(self, parameter: nn.Parameter) -> Slot:
        """Returns the block of a parameter and its number there. Raises UserError for a parameter
        without states."""
        if (place := self._places.get(parameter)) is not None:
            return place
        raise UserError(
            f"exact AdamW has no states for a parameter of {tuple(parameter.shape)} in "
            f"{parameter.dtype}: add it by optimizer.add_param_group. An engine that puts tensors "
            "of its own into the groups, as DeepSpeed's ZeRO does, keeps fp32 masters itself: give "
            "it torch.optim.AdamW"
        )

    @property  # type: ignore[override]
    def state(self) -> StatesByParameter:
        """The states by parameter, as those of torch's optimizers; they are views."""
        return self._states

    @state.setter
    def state(self, states: Any) -> None:
        if "param_groups" not in vars(self) and not states:
            return  # torch's constructor
        for parameter in [*self._places]:
            self.load_states(parameter, states.get(parameter, {}))

    def states_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Returns the parameter's exp_avg, exp_avg_sq and, if it has 16 bits, its remainder and
        checksums, flat, where they live. Call `flush` first."""
        block, i = self._place(parameter)
        block.renew(i, self.stream.piece)
        return self._homes(parameter)

    def _homes(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        block, i = self._place(parameter)
        states = block.states_at(i, block.ranges[i])
        if (checksums := block.checksums_at(i, block.ranges[i])) is not None:
            states.append(checksums)
        return dict(zip(STATES, states, strict=False))

    def lend_states(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Returns what `states_of` does, in the parameter's shape, for code that may keep it. While
        a state is kept, updates end within `step`."""
        self.flush()
        states, (block, _) = self.states_of(parameter), self._places[parameter]
        return {
            name: x if name == "checksums" else block.lend(x).view(parameter.shape)
            for name, x in states.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the dict of torch.optim.AdamW, with each weight's remainder next to its moments,
        and with the checksums of the weights that the remainders belong to. The states are copied
        to the host, 10 bytes per parameter; a run's checkpoints are written block by block instead
        (longctx/train/output/state_files.py)."""
        self.flush()
        packed = super().state_dict()
        numbered = enumerate(p for group in self.param_groups for p in group["params"])
        packed["state"] = {
            n: {name: x.cpu().clone() for name, x in self.state[p].items()}
            for n, p in numbered
            if p in self.counts
        }
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads states and options of this optimizer, or of torch's AdamW or Adam, which continue
        with the present weights as masters. Weights may be loaded before or after. Raises
        ValueError for other states, before anything has changed."""
        self.flush()
        own, saved = self.param_groups, state_dict["param_groups"]
        sizes = [[len(group["params"]) for group in groups] for groups in (own, saved)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the optimizer has groups of {sizes[0]} parameters, the states are of {sizes[1]}"
            )
        parameters = [p for group in own for p in group["params"]]
        numbers = [n for group in saved for n in group["params"]]
        states = [state_dict["state"].get(n, {}) for n in numbers]
        for parameter, found in zip(parameters, states, strict=True):
            self._check_states(parameter, found)
        merged = []
        for group, given in zip(own, saved, strict=True):
            check_options(given)
            merged.append({name: group[name] for name in OPTIONS} | given)
        super().load_state_dict({**state_dict, "state": {}, "param_groups": merged})
        for parameter, found in zip(parameters, states, strict=True):
            self.load_states(parameter, found)

    @torch.no_grad()
    def load_states(self, parameter: nn.Parameter, states: Mapping[str, Any]) -> None:
        """Loads one parameter's states, of any shape and floating type. Empty ones reset it to
        before its first step. Raises ValueError for the states of another optimizer or
        parameter."""
        self.flush()
        self._check_states(parameter, states)
        for name, home in self._homes(parameter).items():
            given = states.get(name)
            if given is not None:
                home.copy_(given.reshape(-1))
            elif name == "checksums" and "remainder" in states:  # older files have none
                home.copy_(weight_checksums(parameter.detach().to(home.device).flatten()))
            else:
                home.zero_()
        block, i = self._places[parameter]
        block.counts[i] = float(states["step"]) if states else 0.0
        self.counts.pop(parameter, None)
        if states:
            self.counts[parameter] = block.counts[i]

    def _check_states(self, parameter: nn.Parameter, states: Mapping[str, Any]) -> None:
        """Raises ValueError for states that are not AdamW's, or not this parameter's."""
        homes = self._homes(parameter)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            if states and name not in states:
                raise ValueError(f"the states have no {name}: they are not AdamW's")
        if "remainder" in states and "remainder" not in homes:
            raise ValueError("the states are of weights in bfloat16, and these have 32 bits")
        for name, home in homes.items():
            given = states.get(name)
            if given is not None and given.numel() != home.numel():
                raise ValueError(
                    f"{name} has {tuple(given.shape)}, its parameter {tuple(parameter.shape)}"
                )

    def masters(self, model: nn.Module) -> dict[str, Tensor]:
        """Returns the model's state dict in fp32, on the host, with 4 bytes per parameter."""
        weights: dict[int, Tensor] = {}  # by id: tied weights are copied once
        found = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, nn.Parameter):
                found[name] = tensor.cpu()
                continue
            if id(tensor) not in weights:
                weights[id(tensor)] = self.master(tensor).cpu()
            found[name] = weights[id(tensor)]
        return found

    def master(self, parameter: nn.Parameter) -> Tensor:
        """Returns the parameter's exact fp32 weights, on its device. Call `flush` first."""
        states = self.states_of(parameter) if parameter in self._places else {}
        remainder = states.get("remainder")
        if remainder is None:
            return parameter.detach().float()
        weight = parameter.detach().flatten()
        return join_master(weight, remainder.to(weight.device)).view(parameter.shape)


def check_options(group: Mapping[str, Any]) -> None:
    """Raises ValueError for a group that asks for another AdamW than this one."""
    for name in ("amsgrad", "maximize", "differentiable"):
        if group.get(name):
            raise ValueError(f"exact AdamW has no {name}: leave it out, or use torch.optim.AdamW")
    if group.get("decoupled_weight_decay") is False and group.get("weight_decay"):
        raise ValueError(
            "the options are Adam's, whose weight decay goes through the moments; AdamW's does "
            "not: set weight_decay to 0, or use torch.optim.Adam"
        )
    _check_numbers(group)


def _check_numbers(options: Mapping[str, Any]) -> None:
    """Raises ValueError for numbers that torch's AdamW refuses; options may be missing."""
    for name in ("lr", "eps", "weight_decay"):
        value = options.get(name, 0.0)
        if not isinstance(value, Real | Tensor) or not float(value) >= 0:
            raise ValueError(f"{name} must be a number and not negative, got {value!r}")
    betas = options.get("betas", (0.0, 0.0))
    if len(betas) != 2 or not all(0 <= float(beta) < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")
