"""Triton's interpreter without a search that it repeats.

A launch replaces what `triton.language` offers by what computes with numpy, and puts it back when
it ends. Triton 3.9 searches the language for it again at each call of a function from within a
kernel, and finds nothing new: 2 ms a call, a third of the time of our kernels' tests.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any


def replace_once_a_launch() -> None:
    """Has functions that see the same modules of the language share one search a launch."""
    with suppress(ImportError, AttributeError):  # no Triton, or one that is made otherwise
        import triton.language as tl
        from triton.runtime import interpreter

        searched: set[tuple[bool, ...]] = set()
        launch, search = interpreter.GridExecutor.__call__, interpreter._patch_lang

        def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
            searched.clear()
            launch(self, *args, **kwargs)

        def search_once(fn: Callable[..., Any]) -> Any:
            seen = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
            modules = tl in seen, tl.core in seen
            if modules in searched:
                return None  # a call from within a kernel, which reads no result
            searched.add(modules)
            return search(fn)

        interpreter.GridExecutor.__call__ = launch_anew
        interpreter._patch_lang = search_once
