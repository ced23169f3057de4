"""flash-attn-4 as it is found, asked to keep its kernels and kept quiet: a stand-in for the package
with its own structure (4.0.0b36), on a GPU that is only said to be there."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from paths import PYTHONPATH

from longctx.attention import flash4
from longctx.attention.backends import Cudnn, Efficient, Flash, _print_once, choose_attention
from longctx.attention.by_length import LONG, ByLength
from longctx.attention.documents import Documents
from longctx.attention.protocol import QKV, AttentionCall
from longctx.errors import UserError
from longctx.kernels.compiling import Notice, announce_compiling
from longctx.packages import pip_install

GPU = torch.device("cuda")
INTERFACE = """
import os, warnings
from pathlib import Path

CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_"


class JITCache(dict):
    pass


class JITPersistentCache:
    def __init__(self, path):
        path.mkdir(parents=True, exist_ok=True)
        self.cache_path, self.memory = path, {}

    def __contains__(self, key):
        return key in self.memory or (self.cache_path / key).exists()

    def __getitem__(self, key):
        return self.memory.get(key) or (self.cache_path / key).read_text()

    def __setitem__(self, key, kernel):
        self.memory[key] = kernel
        (self.cache_path / key).write_text(kernel)

    def clear(self):
        self.memory.clear()


def get_jit_cache(name):
    if os.getenv(CACHE + "ENABLED", "0") == "1":
        return JITPersistentCache(Path(os.environ[CACHE + "DIR"]) / "hash" / name)
    return JITCache()


def cute_compile(argument):
    text = f"Argument {argument} (position 17) cannot be converted to a JitArgument for function f"
    warnings.warn_explicit(text, UserWarning, "dsl.py", 2300, "cutlass.base_dsl.dsl")
    return "a kernel"


def _flash_attn_fwd(key, argument="aux_data"):
    if key not in _flash_attn_fwd.compile_cache:
        _flash_attn_fwd.compile_cache[key] = cute_compile(argument)
    return _flash_attn_fwd.compile_cache[key]


def _flash_attn_bwd(key):
    pass


_flash_attn_fwd.compile_cache = get_jit_cache("fwd")
_flash_attn_bwd.compile_cache = get_jit_cache("bwd")
"""


def _forget(monkeypatch) -> None:
    """flash_attn was never imported."""
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def package(tmp_path: Path, monkeypatch):
    """Makes flash-attn-4 importable, with this text as its interface, as in a new process."""

    def install(interface: str = INTERFACE) -> None:
        folder = tmp_path / "site" / "flash_attn" / "cute"
        folder.mkdir(parents=True, exist_ok=True)
        for package in (folder.parent, folder):  # or another flash_attn, really installed, wins
            (package / "__init__.py").touch()
        (folder / "interface.py").write_text(interface)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        _forget(monkeypatch)
        flash4.load.cache_clear()

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in (flash4.ENABLED, flash4.FOLDER):
        monkeypatch.setenv(name, "")  # so that what load() sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(flash4, "NOTICE", Notice())
    yield install
    flash4.load.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]


@pytest.fixture
def gpu(monkeypatch):
    _print_once.cache_clear()

    def of(major: int, minor: int = 0, cudnn: int = 91900) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)

    return of


@pytest.mark.parametrize(
    ("capability", "with_package", "without"),
    [
        ((8, 0), "flash", "flash"),
        ((8, 6), "flash", "flash"),
        ((8, 9), "flash", "flash"),
        ((9, 0), "fa4", "cudnn"),
        ((10, 0), "fa4", "cudnn"),
        ((10, 3), "fa4", "cudnn"),
        ((11, 0), "flash", "flash"),
        ((12, 0), "flash", "flash"),
        ((12, 1), "flash", "flash"),
    ],
)
def test_auto_by_gpu(package, gpu, monkeypatch, capability, with_package, without) -> None:
    gpu(*capability)
    with monkeypatch.context() as patch:
        patch.setattr(flash4, "present", lambda: False)
        assert choose_attention("auto", GPU, torch.bfloat16)[0] == without
    package()
    assert choose_attention("auto", GPU, torch.bfloat16)[0] == with_package
    assert choose_attention("auto", GPU, torch.float32)[0] == "math"
    for name in ("cudnn", "flash", "math"):
        assert choose_attention(name, GPU, torch.bfloat16)[0] == name


def test_with_windows_auto_avoids_cudnn_which_has_none(package, gpu, monkeypatch) -> None:
    gpu(9)
    with monkeypatch.context() as patch:
        patch.setattr(flash4, "present", lambda: False)
        assert choose_attention("auto", GPU, torch.bfloat16, windows=True)[0] == "flash"
    package()
    assert choose_attention("auto", GPU, torch.bfloat16, windows=True)[0] == "fa4"
    with pytest.raises(UserError, match="cudnn has no sliding windows, .*: use flash, fa4"):
        choose_attention("cudnn", GPU, torch.bfloat16, windows=True)


def test_capped_scores_are_for_flash4_and_math(package, gpu, monkeypatch, capsys) -> None:
    gpu(9)
    capped = dict(softcap=50.0, head_dim=256)
    with monkeypatch.context() as patch:
        patch.setattr(flash4, "present", lambda: False)
        assert choose_attention("auto", GPU, torch.bfloat16, **capped)[0] == "math"
        said = capsys.readouterr().out
        assert "flash-attn-4 is not installed" in said and "plain torch computes them" in said
    package()
    name, attention = choose_attention("auto", GPU, torch.bfloat16, **capped)
    assert name == "fa4" and attention.softcap == 50.0
    for name in ("cudnn", "flash"):
        with pytest.raises(UserError, match=f"{name} has no cap of attention's scores.*: use fa4"):
            choose_attention(name, GPU, torch.bfloat16, **capped)
    gpu(10)
    assert choose_attention("auto", GPU, torch.bfloat16, **capped)[0] == "math"
    assert choose_attention("auto", GPU, torch.bfloat16, softcap=50.0)[0] == "fa4"
    gpu(12)
    with pytest.raises(UserError, match="no backward kernel for capped scores .*; use math"):
        choose_attention("fa4", GPU, torch.bfloat16, softcap=50.0)


def test_heads_that_it_gets_wrong(package, gpu, capsys) -> None:
    package()
    gpu(9)
    assert choose_attention("auto", GPU, torch.bfloat16, head_dim=24)[0] == "fa4"
    assert choose_attention("auto", GPU, torch.bfloat16, head_dim=16)[0] == "cudnn"
    assert "flash-attn-4 gives wrong gradients for heads of 16" in capsys.readouterr().out
    with pytest.raises(UserError, match="wrong gradients for heads of 16; use flash or cudnn"):
        choose_attention("fa4", GPU, torch.bfloat16, head_dim=16)


def test_heads_that_are_too_large_for_it(package, gpu) -> None:
    """Gemma 4's of 512: `auto` takes the op that has such heads, or plain torch."""
    package()
    gpu(9)
    assert "no kernel for heads of 512" in (flash4.why_not(GPU, 512) or "")
    name, attention = choose_attention("auto", GPU, torch.bfloat16, head_dim=512)
    assert name == "efficient" and isinstance(attention, Efficient)
    for more in (dict(windows=True), dict(softcap=50.0)):
        assert choose_attention("auto", GPU, torch.bfloat16, head_dim=512, **more)[0] == "math"
    for name in ("fa4", "cudnn", "flash"):
        with pytest.raises(UserError, match=f"{name} takes heads of at most 256: use auto or math"):
            choose_attention(name, GPU, torch.bfloat16, head_dim=512)


def test_auto_avoids_a_cudnn_that_torch_avoids(gpu, monkeypatch) -> None:
    monkeypatch.setattr(flash4, "present", lambda: False)
    gpu(9, cudnn=91500)
    assert choose_attention("auto", GPU, torch.bfloat16)[0] == "flash"
    gpu(9, cudnn=91501)
    assert choose_attention("auto", GPU, torch.bfloat16)[0] == "cudnn"


def test_auto_leaves_short_documents_to_flash(gpu, monkeypatch, capsys) -> None:
    """cuDNN would build a plan for each of their lengths. By name it takes them all."""
    monkeypatch.setattr(flash4, "present", lambda: False)
    gpu(9)
    attention = choose_attention("auto", GPU, torch.bfloat16)[1]
    assert isinstance(attention, ByLength) and attention.long_tokens == LONG
    assert (type(attention.short), type(attention.long)) == (Flash, Cudnn)
    said = capsys.readouterr().out
    assert f"flash-attn-4 is not installed ({pip_install('flash-attn-4')})" in said
    assert "cudnn for documents of 16384 tokens and more, flash for shorter ones" in said
    assert type(choose_attention("cudnn", GPU, torch.bfloat16)[1]) is Cudnn


@pytest.mark.parametrize("major", [9, 10, 11, 12])
def test_by_name_wherever_it_has_both_directions(package, gpu, major) -> None:
    package()
    gpu(major)
    assert choose_attention("fa4", GPU, torch.bfloat16)[0] == "fa4"


def test_by_name_an_error_says_what_to_use(package, gpu, monkeypatch) -> None:
    package()
    gpu(8, 6)
    with pytest.raises(UserError, match=r"no backward kernel for this GPU \(sm_86\); use flash"):
        choose_attention("fa4", GPU, torch.bfloat16)
    gpu(9)
    monkeypatch.setattr(flash4, "present", lambda: False)
    with pytest.raises(UserError, match=r"not installed \(pip install '?flash-attn-4.*\); use f"):
        choose_attention("fa4", GPU, torch.bfloat16)


def test_half_installed_is_said_and_passed_over(package, gpu, capsys) -> None:
    package("raise OSError('libcudart.so.13 is missing')")
    gpu(9)
    with pytest.raises(UserError, match="does not load: libcudart.so.13 is missing; use flash"):
        choose_attention("fa4", GPU, torch.bfloat16)
    for _ in range(2):
        assert choose_attention("auto", GPU, torch.bfloat16)[0] == "cudnn"
    assert capsys.readouterr().out.count("does not load: libcudart.so.13 is missing") == 1


@pytest.mark.parametrize("name", ["auto", "flash", "math"])
def test_before_ampere_nothing_of_custom_runs(gpu, name) -> None:
    gpu(7, 5)
    with pytest.raises(UserError, match="needs an Ampere or newer GPU and this is sm_75: use"):
        choose_attention(name, GPU, torch.float16)


def test_geforce_blackwell_has_no_deterministic_backward(package, gpu, monkeypatch) -> None:
    package()
    gpu(12)
    attention = choose_attention("fa4", GPU, torch.bfloat16)[1]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(UserError, match="no deterministic backward .*sm_120.*: use .* flash"):
        attention.backward(torch.empty(0), None)


def test_flash_attn_2_is_another_package(tmp_path: Path, monkeypatch) -> None:
    _forget(monkeypatch)
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise OSError")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not flash4.present()
    (tmp_path / "flash_attn" / "cute").mkdir()
    (tmp_path / "flash_attn" / "cute" / "interface.py").touch()
    assert flash4.present()


def test_kernels_are_kept_where_only_their_owner_writes(package, tmp_path, capsys) -> None:
    package()
    flash4.NOTICE.wanted = True
    assert flash4.load()._flash_attn_fwd("k") == "a kernel"
    (folder,) = (tmp_path / "home" / ".cache" / "longctx" / "flash-attn-4").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "hash" / "fwd" / "k").exists()
    line = f"compiling kernels, kept for later runs in {folder} (flash-attn-4)\n"
    assert capsys.readouterr().out == line

    package()  # the next process
    flash4.NOTICE.wanted = True
    assert flash4.load()._flash_attn_fwd("k") == "a kernel"
    assert capsys.readouterr().out == ""
    flash4.load()._flash_attn_fwd.compile_cache.clear()  # whatever else it is asked


@pytest.mark.parametrize("harm", ["others write", "a file", "no locks"])
def test_a_folder_that_cannot_be_had_is_said(package, tmp_path, monkeypatch, capsys, harm) -> None:
    folder = tmp_path / "home" / ".cache" / "longctx" / "flash-attn-4" / flash4._identity()
    folder.parent.mkdir(parents=True)
    if harm == "others write":
        folder.mkdir()
        folder.chmod(0o777)
    elif harm == "a file":
        folder.touch()
    else:

        def flock(*args: int) -> None:
            raise OSError(37, os.strerror(37))

        monkeypatch.setattr(fcntl, "flock", flock)
    package()
    flash4.NOTICE.wanted = True
    assert flash4.load()._flash_attn_fwd("k") == "a kernel"
    kept, compiled = capsys.readouterr().out.splitlines()
    assert kept.startswith(f"flash-attn-4's kernels are not kept in {folder}: ")
    assert compiled == "compiling kernels"


def test_the_environment_decides(package, tmp_path, monkeypatch, capsys) -> None:
    flash4.NOTICE.wanted = True
    monkeypatch.setenv(flash4.ENABLED, "0")
    package()
    flash4.load()._flash_attn_fwd("k")
    assert capsys.readouterr().out == "compiling kernels\n"
    assert not (tmp_path / "home").exists()
    monkeypatch.delenv(flash4.ENABLED)
    monkeypatch.setenv(flash4.FOLDER, str(tmp_path / "mine"))
    package()
    flash4.load()._flash_attn_fwd("k")
    assert (tmp_path / "mine" / "hash" / "fwd" / "k").exists()
    assert not (tmp_path / "home").exists()


def test_another_processor_or_setting_has_a_folder_of_its_own(monkeypatch) -> None:
    before = flash4._identity()
    assert flash4._identity() == before
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    with_lines = flash4._identity()
    monkeypatch.setattr(flash4, "cpu_line", lambda *names: "flags: avx512")
    assert len({before, with_lines, flash4._identity()}) == 3


def test_a_full_disk_costs_a_compilation(package) -> None:
    package()
    interface = flash4.load()
    kept = interface._flash_attn_fwd.compile_cache._kept

    def full(key, *kernel):
        kept.memory[key] = "a kernel"
        raise OSError(28, os.strerror(28))

    for name in ("__contains__", "__setitem__"):
        setattr(type(kept), name, lambda self, *args: full(*args))
    assert interface._flash_attn_fwd("k") == "a kernel"


def test_only_the_warning_that_it_always_gives_is_silent(package) -> None:
    package()
    interface = flash4.load()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")  # pytest and others set filters after the import
        interface._flash_attn_fwd("a")
        interface._flash_attn_fwd("b", "aux_data2")
        same = "Argument aux_data (position 17) cannot be converted to a JitArgument"
        warnings.warn(same, stacklevel=1)  # of another library
        warnings.warn_explicit("another one", UserWarning, "dsl.py", 1, "cutlass.base_dsl.dsl")
    texts = [str(warning.message).split(" (")[0] for warning in heard]
    assert texts == ["Argument aux_data2", "Argument aux_data", "another one"]


@pytest.mark.gpu
def test_the_second_process_compiles_nothing_and_computes_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("flash_attn.cute")
    ours = {flash4.ENABLED, flash4.FOLDER}
    environment = {k: v for k, v in os.environ.items() if k not in ours} | {"HOME": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join((PYTHONPATH, os.environ.get("PYTHONPATH", "")))
    first, second = (
        subprocess.run(
            [sys.executable, __file__], env=environment, capture_output=True, text=True, check=True
        )
        for _ in range(2)
    )
    assert "aux_data" not in first.stderr + second.stderr
    notice, bits = first.stdout.splitlines()
    assert f"{tmp_path}/.cache/longctx/flash-attn-4/" in notice
    assert second.stdout.splitlines() == [bits]


def _main() -> None:
    """Two documents forward and backward, and a hash of every bit that came out."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    announce_compiling()
    attention = choose_attention("fa4", GPU, torch.bfloat16)[1]
    shape = dict(device="cuda", dtype=torch.bfloat16)
    q, do, o = (torch.randn(200, 8, 128, **shape) for _ in range(3))
    qkv = QKV(q, *(torch.randn(200, 2, 128, **shape) for _ in range(2)))
    lse = torch.empty(8, 200, device="cuda")
    documents = Documents.of([70, 130], device=GPU)
    call = AttentionCall(qkv, documents, 128**-0.5, o, lse)
    attention.forward(call)
    grads = attention.backward(do, call)
    numbers = torch.cat([x.float().flatten() for x in (o, lse, *grads)]).cpu().numpy()
    print(hashlib.sha256(numbers.tobytes()).hexdigest())


if __name__ == "__main__":
    _main()
