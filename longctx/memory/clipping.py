"""The norm of all gradients, and the factors by which clipping scales them.

The norm is the same wherever gradients are: squares are summed in fp32, chunk by chunk and always
in one order (kernels/square_sums.py), and the sums of all chunks in fp64. A gradient that leaves
for the host is measured before it does; those on the GPU are measured together, in one launch.
(torch.nn.utils.clip_grad_norm_ rounds each bf16 gradient's norm to 8 bits.)

Clipping leaves a gradient in 16 bits as it is, and the update multiplies it by the factor in fp32,
so that nothing is rounded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from longctx.kernels.square_sums import many_square_sums, square_sums
from longctx.memory.held import Held, HeldGradient
from longctx.memory.states import Slot


class Clipping:
    """The square sums and the factors of a model's gradients, which it is given at each call."""

    def __init__(self, device: torch.device, chunk: int) -> None:
        """`chunk` is the number of elements of which squares are summed in fp32."""
        self.device, self.chunk = device, chunk
        self.measured: dict[Slot, tuple[Tensor, int, int]] = {}
        """Square sums of the gradients that are not held, as `norm` last measured them: the sums of
        all of them, and the first and last index of this gradient's."""
        self.clipped: dict[Slot, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        """Gradients in 16 bits that `scale` left unchanged: their version then, and their
        factor."""

    def norm(self, grads: Mapping[Slot, Tensor]) -> Tensor:
        """Returns the norm of all gradients, fp32, ()."""
        here = {slot: grad for slot, grad in grads.items() if not isinstance(grad, HeldGradient)}
        squares = self._measure(here)
        whole = all(self.factor(slot, grad) is None for slot, grad in here.items())
        if whole and len(here) == len(grads):
            return norm_from([squares])
        return norm_from([self._squares_of(slot, grad) for slot, grad in grads.items()])

    def _measure(self, grads: Mapping[Slot, Tensor]) -> Tensor:
        """Measures gradients that are not held, and returns the sums of their squares, fp32."""
        if not grads:
            return torch.zeros(0, device=self.device)
        here = [grad.to(self.device).contiguous() for grad in grads.values()]
        sums, starts = many_square_sums(here, self.chunk)
        for slot, start, stop in zip(grads, starts, starts[1:], strict=False):
            self.measured[slot] = sums, start, stop
        return sums

    def _squares_of(self, slot: Slot, grad: Tensor) -> Tensor:
        """Returns the square sums of a gradient, which was measured if it is not held."""
        if isinstance(grad, HeldGradient):
            return grad.held.gradients.squares_of(grad.held)
        sums, start, stop = self.measured[slot]
        return _scaled(sums[start:stop], self.factor(slot, grad))

    def squares_of_held(self, held: Held) -> Tensor:
        """Returns the square sums of a held gradient, measured again if it is on a device."""
        if held.here is not None:
            held.squares = square_sums(held.here.to(self.device).contiguous(), self.chunk)
        assert held.squares is not None
        return _scaled(held.squares, held.factor)

    def last_squares(self, slot: Slot, grad: Tensor | None) -> Tensor | None:
        """Returns the square sums that were measured before `scale` multiplied the gradient by a
        factor, which is NaN if any gradient is; None of one that is gone and was not measured."""
        if isinstance(grad, HeldGradient):
            held = grad.held
            return held.gradients.squares_of(held) if held.squares is None else held.squares
        if slot not in self.measured:
            if grad is None:
                return None
            self._measure({slot: grad})
        sums, start, stop = self.measured[slot]
        return sums[start:stop]

    def scale(
        self, grads: Mapping[Slot, Tensor], factor: Tensor, is_seen: Callable[[Tensor], bool]
    ) -> None:
        """Multiplies gradients by a factor, fp32, (): those in 16 bits when the update reads them,
        unless `is_seen` says that other code has views of them."""
        at_once: dict[torch.device, list[Tensor]] = {}
        for slot, grad in grads.items():
            if isinstance(grad, HeldGradient):
                grad.held.gradients.multiply(grad.held, factor)
            elif grad.dtype == torch.float32 or is_seen(grad):
                at_once.setdefault(grad.device, []).append(grad)
            else:
                earlier = self.factor(slot, grad)
                product = factor if earlier is None else earlier * factor
                self.clipped[slot] = weakref.ref(grad), grad._version, product
        for device, some in at_once.items():
            torch._foreach_mul_(some, factor.to(device))

    def factor(self, slot: Slot, grad: Tensor) -> Tensor | None:
        """Returns the factor by which the update multiplies a gradient that is not held, fp32, ();
        None for 1."""
        reference, version, factor = self.clipped.get(slot, (None, 0, None))
        if reference is None or reference() is not grad:
            return None
        if grad._version != version:
            del self.clipped[slot]
            if not grad.any():  # zero_grad(set_to_none=False)
                return None
            raise RuntimeError(
                "a gradient was changed after optimizer.clip: change gradients first, clip last"
            )
        return factor


def _scaled(squares: Tensor, factor: Tensor | None) -> Tensor:
    """Returns the square sums of a gradient times a factor."""
    return squares if factor is None else squares.double() * factor.double().square()


def norm_from(squares: list[Tensor]) -> Tensor:
    """Returns the norm, fp32, (), from the square sums of all gradients."""
    return torch.cat(squares).double().sum().sqrt().float()
