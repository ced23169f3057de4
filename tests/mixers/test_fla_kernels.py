"""flash-linear-attention's versions, and our kernel where it has none, with stubs for it."""

from __future__ import annotations

import math
import sys
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from longctx.errors import UserError
from longctx.kernels.delta_rule import chunk_gradients
from longctx.mixers import fla_kernels
from longctx.patching.patch import patch_as
from longctx.settings import PatchOptions


class Mode(Enum):
    DISABLED = 0
    FULL = 1
    STRICT = 2


class Registry:
    """Stands in for fla.backends: what is registered, and for which functions."""

    BaseBackend = type("BaseBackend", (), {})

    def __init__(self) -> None:
        self.found: list[tuple[str, type]] = []
        self.configs: Any = None

    def register(self, of: str) -> Any:
        return lambda kind: self.found.append((of, kind)) or kind


def prepare(
    monkeypatch: pytest.MonkeyPatch,
    *,
    fla: str | None = "0.6.0",
    triton: str = "3.6.0",
    capability: tuple[int, int] | None = (9, 0),
    mode: Mode = Mode.DISABLED,
    columns: int = 128,
) -> Registry:
    registry = Registry()
    configs = SimpleNamespace(FlaCacheMode=Mode, FLA_CACHE_MODE=mode, load_cached_config=None)
    registry.configs = configs
    for name, module in {"backends": registry, "ops.utils": SimpleNamespace(cache=configs)}.items():
        monkeypatch.setitem(sys.modules, f"fla.{name}", module)
    monkeypatch.setattr(fla_kernels, "installed", lambda module: fla is not None)
    versions = {"flash-linear-attention": fla, "triton": triton}
    monkeypatch.setattr(fla_kernels, "version_of", versions.get)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    for once in (fla_kernels._register, fla_kernels._configure):
        once.cache_clear()
    try:
        fla_kernels.prepare_fla(SimpleNamespace(linear_key_head_dim=columns))
    finally:
        for once in (fla_kernels._register, fla_kernels._configure):
            once.cache_clear()
    return registry


def test_where_ours_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [of for of, _ in prepare(monkeypatch).found] == ["common"]
    assert prepare(monkeypatch, triton="3.4.0").found
    elsewhere: tuple[dict[str, Any], ...] = (
        dict(triton="3.7.1"),
        dict(triton="3.3.1"),
        dict(capability=(8, 9)),
        dict(capability=None),
        dict(fla=None),
    )
    for machine in elsewhere:
        assert not prepare(monkeypatch, **machine).found, machine


def test_hugging_faces_layers_get_the_kernel_where_the_package_is_imported(monkeypatch) -> None:
    prepared: list[Any] = []
    monkeypatch.setattr(fla_kernels, "prepare_fla", prepared.append)
    config = LlamaConfig(vocab_size=64, hidden_size=32, num_attention_heads=4, num_hidden_layers=1)
    for class_type in ("vanilla", "any"):
        for imported in (False, True):
            monkeypatch.delitem(sys.modules, "fla", raising=False)
            if imported:
                monkeypatch.setitem(sys.modules, "fla", SimpleNamespace())
            model = LlamaForCausalLM(config)
            patch_as(model, PatchOptions(class_type=class_type), model.device)
            assert prepared == [config] * imported
            prepared.clear()


def test_configurations_are_given_once_and_not_to_whom_has_them(monkeypatch) -> None:
    given = prepare(monkeypatch).configs
    assert given.FLA_CACHE_MODE is Mode.FULL
    assert given.load_cached_config("l2norm_fwd_kernel", None)["kwargs"] == {"BT": 16}
    assert given.load_cached_config("another") is None
    for machine in (dict(mode=Mode.STRICT), dict(columns=256), dict(capability=(10, 0))):
        found = prepare(monkeypatch, **machine).configs
        assert found.load_cached_config is None, machine


def test_an_old_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"0\.5\.2.*too old: pip install .*>=0\.6"):
        prepare(monkeypatch, fla="0.5.2")


def test_the_function_as_the_package_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments by name, with ones that it passes as None."""
    [(_, kind)] = prepare(monkeypatch).found
    torch.manual_seed(0)
    keys, values = ((1, 40, 2, n) for n in (16, 32))
    given: dict[str, Any] = {name: torch.randn(keys).bfloat16() for name in ("q", "k", "w")}
    given |= {name: torch.randn(values).bfloat16() for name in ("v", "do", "dv")}
    given |= {name: torch.randn(1, 3, 2, 16, 32).bfloat16() for name in ("h", "dh")}
    given |= dict(g=-torch.rand(1, 40, 2) / math.log(2), g_gamma=None, scale=0.25, chunk_size=16)
    given |= dict(cu_seqlens=None, chunk_indices=None, state_v_first=False)
    order = ("q", "k", "v", "do", "dv", "g", "h", "dh")
    for bounds in (None, torch.tensor([0, 40]), torch.tensor([0, 15, 40])):  # as packed rows have
        asked = given | {"cu_seqlens": bounds}
        takes, _ = kind().chunk_bwd_dqkwg_verifier(**asked)
        assert takes
        ours = chunk_gradients(*(given[name] for name in order), 0.25, 16, bounds)
        for own, found in zip(ours, kind().chunk_bwd_dqkwg(**asked), strict=True):
            assert torch.equal(own, found)
    others: tuple[dict[str, Any], ...] = (
        dict(g=None),
        dict(w=None),
        dict(state_v_first=True),
        dict(h=given["h"].float()),
        dict(h=SimpleNamespace(shape=(1, 3, 2, 512, 32), dtype=torch.bfloat16)),
    )
    for other in others:
        takes, reason = kind().chunk_bwd_dqkwg_verifier(**given | other)
        assert not takes and reason, other
