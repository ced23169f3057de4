"""AdamW with exact states: fp32 master weights and moments, wherever they live.

    g = grad min(1, max_norm / |grad|)      m = b1 m + (1 - b1) g      v = b2 v + (1 - b2) g g
    p = p - lr wd p - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

AdamW: Loshchilov and Hutter 2019, arXiv 1711.05101. One step is that of torch's fp32 AdamW, for
bf16 weights too: the remainder beside each holds the rest of its fp32 master (kernels/adamw.py).

Updates are lazy, and nobody can see it. `step` updates what lies on the GPU at once. What lies on
the host is updated just before its block's next forward, with the learning rate, norm and gradients
of the finished step, while the blocks before it compute: the numbers are those of an update at
once. `flush` ends what is outstanding. Whoever reads weights or states other than through a
module's forward calls it first: this file does in `state_dict`, run/states.py in the model's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from longctx.kernels.adamw import join_master
from longctx.memory.gradients import Gradients
from longctx.memory.states import Step
from longctx.memory.stream import StateStream

STATES = ("exp_avg", "exp_avg_sq", "remainder")


class ExactAdamW(torch.optim.Optimizer):
    """A torch optimizer over the blocks of a model. It takes each gradient from its parameter as
    backward finishes it: `parameter.grad` is None afterwards.
    """

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

        Raises ValueError for a parameter that is frozen or in no block.
        """
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults)
        self.stream = stream
        self.gradients = Gradients(stream, is_last=is_last)
        self.steps: dict[nn.Parameter, int] = {}
        """How often each parameter was updated."""
        self._scale: Tensor | None = None
        self._places = {
            parameter: (block, i)
            for block in stream.blocks
            for i, parameter in enumerate(block.parameters[: len(block.ranges)])
            if parameter.requires_grad
        }
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self._places:
                    raise ValueError(
                        f"a parameter of {tuple(parameter.shape)} is frozen or in no block"
                    )
                parameter.register_post_accumulate_grad_hook(_capturing(weakref.ref(self)))

    # --- a step ------------------------------------------------------------------------------

    def _capture(self, parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is None:
            return
        block, i = self._places[parameter]  # type: ignore[index]
        if block.update is not None:  # a loop whose forward went past the block's modules
            self.stream.flush()
        self.stream.wait(block)  # for an update that still reads the room of this gradient
        parameter.grad = None
        self.gradients.add(block, i, grad)

    def clip(self, max_norm: float | None = None) -> Tensor:  # () fp32
        """The norm of all gradients; the step scales them down to `max_norm`."""
        norm = self.gradients.norm()
        if max_norm:
            self._scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch's clip_grad_norm_
        return norm

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Updates every parameter that has a gradient, on the host later (`flush`)."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(block.update is not None for block in self.stream.blocks):
            self.stream.flush()
        scale, self._scale = self._scale, None
        self.gradients.norm()  # all that backward delivered has arrived
        taken = self.gradients.take()
        for group in self.param_groups:
            for parameter in group["params"]:
                place = self._places[parameter]
                if place in taken:
                    self._outstand(parameter, group, taken[place], scale)
        self.stream.begin_updates()
        return loss

    def _outstand(
        self, parameter: nn.Parameter, group: dict[str, Any], grad: Tensor | None, scale: Any
    ) -> None:
        """Notes the parameter's step, with the options that hold now."""
        block, i = self._places[parameter]
        self.steps[parameter] = step = self.steps.get(parameter, 0) + 1
        beta1, beta2 = group["betas"]
        options = dict(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
            scale=scale,
        )
        block.update = (block.update or {}) | {i: Step(grad=grad, options=options)}

    def flush(self) -> None:
        """Ends every outstanding update: weights and states may be read, wherever they are."""
        self.stream.flush()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of this step."""
        self.gradients.clear()
        self._scale = None
        super().zero_grad(set_to_none)

    def broken_gradient(self) -> str | None:
        """The parameter whose gradient is not finite, the first in the order of backward."""
        place = self.gradients.broken()
        if place is None:
            return None
        block, i = place
        names = {parameter: name for name, parameter in block.spec.parameters.items()}
        return names[block.parameters[i]]

    # --- states, whole -----------------------------------------------------------------------

    def states_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The parameter's exp_avg, exp_avg_sq and, in 16 bits, remainder: flat, where they live.
        Call `flush` first."""
        block, i = self._places[parameter]
        states = block.states_at(i, block.ranges[i])
        return dict(zip(STATES, states, strict=False))

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's, with the remainder of each weight beside its moments. The states
        are copied to the host, 10 bytes a parameter; a run's checkpoints are written block by block
        instead (longctx/output/states.py)."""
        self.flush()
        packed = super().state_dict()
        numbered = enumerate(p for group in self.param_groups for p in group["params"])
        packed["state"] = {
            n: {"step": torch.tensor(float(self.steps[p]))}
            | {name: s.view(p.shape).cpu().clone() for name, s in self.states_of(p).items()}
            for n, p in numbered
            if p in self.steps
        }
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the states of this optimizer, or of torch's AdamW or Adam: then the master weights
        are the weights. The options of the groups stay. Raises ValueError for other states."""
        if not state_dict["state"] and not self.steps:
            return
        self.flush()
        parameters = [p for group in self.param_groups for p in group["params"]]
        groups = [[*group["params"]] for group in state_dict["param_groups"]]
        if [len(g) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError(
                f"the optimizer has groups of {[len(g['params']) for g in self.param_groups]} "
                f"parameters, the states are of {[len(g) for g in groups]}"
            )
        self.steps.clear()
        numbers = [n for group in groups for n in group]
        for parameter, n in zip(parameters, numbers, strict=True):
            self.load_states(parameter, state_dict["state"].get(n, {}))

    @torch.no_grad()
    def load_states(self, parameter: nn.Parameter, states: Mapping[str, Any]) -> None:
        """One parameter's states, of any shape and floating type; none: as before its first step.
        Raises ValueError for those of another optimizer or parameter."""
        homes = self.states_of(parameter)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            if states and name not in states:
                raise ValueError(f"the states have no {name}: they are not AdamW's")
        if "remainder" in states and "remainder" not in homes:
            raise ValueError("the states are of weights in bfloat16, and these have 32 bits")
        for name, home in homes.items():
            given = states.get(name)
            if given is None:
                home.zero_()
                continue
            if given.numel() != home.numel():
                raise ValueError(
                    f"{name} has {tuple(given.shape)}, its parameter {tuple(parameter.shape)}"
                )
            home.copy_(given.reshape(-1))
        self.steps.pop(parameter, None)
        if states:
            self.steps[parameter] = int(states["step"])

    def masters(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's state dict in fp32, on the host: 4 bytes a parameter."""
        weights: dict[int, Tensor] = {}  # tied ones once
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
        """The parameter's weights in fp32, exact, on its device. Call `flush` first."""
        states = self.states_of(parameter) if parameter in self._places else {}
        remainder = states.get("remainder")
        if remainder is None:
            return parameter.detach().float()
        weight = parameter.detach().flatten()
        return join_master(weight, remainder.to(weight.device)).view(parameter.shape)


def _capturing(optimizer: weakref.ref[ExactAdamW]) -> Callable[[Tensor], None]:
    """A parameter's hook. It must not hold the optimizer: garbage collection does not see through
    hooks of parameters, and a cycle with one would stay for ever."""

    def capture(parameter: Tensor) -> None:
        if (alive := optimizer()) is not None:
            alive._capture(parameter)

    return capture
