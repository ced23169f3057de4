"""That kernels are compiled is said when one is, and not when all of them were found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import PYTHONPATH

from longctx.kernels import compiling
from longctx.kernels.compiling import Notice, _listener, announce_compiling


def test_said_once_and_only_where_somebody_trains(capsys) -> None:
    notice = Notice()
    notice.folders = {"Triton": "/a", "flash-attn-4": "/b"}
    notice.compiled()
    assert capsys.readouterr().out == ""
    notice.wanted = True
    notice.compiled()
    notice.compiled()
    line = "compiling kernels, kept for later runs in /a (Triton) and /b (flash-attn-4)\n"
    assert capsys.readouterr().out == line


def test_nothing_is_promised_of_kernels_that_are_not_kept(capsys) -> None:
    notice = Notice()
    notice.wanted = True
    notice.compiled()
    assert capsys.readouterr().out == "compiling kernels\n"


def test_another_listener_hears_as_much_as_before(monkeypatch, capsys) -> None:
    notice, heard = Notice(), []
    notice.wanted = True
    monkeypatch.setattr(compiling, "NOTICE", notice)
    listener = _listener(lambda **compiled: heard.append(compiled))
    listener(cache_hit=True, src="a")
    assert capsys.readouterr().out == ""
    listener(cache_hit=False, src="b")
    assert capsys.readouterr().out == "compiling kernels\n"
    assert heard == [{"cache_hit": True, "src": "a"}, {"cache_hit": False, "src": "b"}]


@pytest.mark.ci
def test_the_second_process_finds_what_the_first_compiled(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs triton: pip install triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((PYTHONPATH, os.environ.get("PYTHONPATH", "")))
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    said = [
        subprocess.run(
            [sys.executable, __file__], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    assert said == [f"compiling kernels, kept for later runs in {tmp_path} (Triton)\n", ""]


def _main() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from longctx.kernels.scale import _scale_kernel

    announce_compiling()
    pointers = {f"{name}_ptr": "*bf16" for name in ("x", "scale", "out")}
    signature = {**pointers, "numel": "i32", "BLOCK": "constexpr"}
    source = ASTSource(fn=_scale_kernel, signature=signature, constexprs={"BLOCK": 2048})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))


if __name__ == "__main__":
    _main()
