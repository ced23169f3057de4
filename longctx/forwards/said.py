"""Reports, once each, the calls of a patched model that Hugging Face's code runs, and refuses calls
that are traced or exported.

torch.compile leaves our forwards as they are, since their kernels are written by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longctx.errors import UserError, print_rank0
from longctx.families.families import base_of
from longctx.families.strangers import why_not_scheduled
from longctx.runtime.runtime import Runtime, runtime_of

_NO_TRACE = (
    "the schedule cannot be traced or transformed: longctx.unpatch(model) first, for torch.export, "
    "torch.compile(fullgraph=True), torch.jit and torch.func"
)
untraced = torch.compiler.disable(reason=_NO_TRACE)


def known_runtime(model: Any) -> Runtime:
    runtime = runtime_of(model)
    assert runtime is not None
    return runtime


def decline(runtime: Runtime, what: str, reason: str) -> None:
    """Reports once what Hugging Face's code does instead of ours; in training `strict` forbids
    it."""
    line = _instead(what, reason)
    if runtime.around.strict and torch.is_grad_enabled():
        raise UserError(f"{line} (strict=True)")
    say(runtime, line)


def foretell(model: Any, is_dropout: Callable[[str], bool] = lambda reason: False) -> None:
    """Says of a patched model that Hugging Face's layers will run in training, if they will: at its
    first call nothing more is said. `is_dropout` tells whether --dropout 0 would help."""
    base = base_of(model)
    if base is not None and (reason := why_not_scheduled(base, training=True)):
        ours = "; with --dropout 0 ours do" if is_dropout(reason) else ""
        say(known_runtime(base), _instead(HF_LAYERS, reason), ours)


HF_LAYERS = "Hugging Face's layers run"


def _instead(what: str, reason: str) -> str:
    return f"{what} for calls with {reason}"


def say(runtime: Runtime, line: str, more: str = "") -> None:
    """Prints a line once, the first time with what `more` is known."""
    if line not in runtime.warned:
        runtime.warned.add(line)
        print_rank0(f"custom: {line}{more}")


def check_untraced() -> None:
    """Raises UserError if the call is exported, traced or transformed. torch.compile leaves our
    forwards out, and prints _NO_TRACE where it may not."""
    if (
        torch.compiler.is_exporting()
        or torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        raise UserError(_NO_TRACE)
