"""Our convolution, scan and gated norm in the place of a module's, while a mixer runs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from exactness import DEVICE, assert_exact
from longctx.kernels import launch
from longctx.kernels.state_space import scan_reference
from longctx.layer.row_documents import RowDocuments
from longctx.layer.specs.mixer_spec import MixerSpec
from longctx.mixers import mixer_kernels
from longctx.mixers.mixer_kernels import MixerCall, OurConvolution, our_functions, our_gated_norm
from longctx.mixers.mixers import Carried, ModelsMixer

pytestmark = pytest.mark.usefixtures("reference_kernels")
CHANNELS, TAPS = 6, 4


def convolved(x: Tensor, weight: Tensor, tokens: int, **how: Any) -> Tensor:
    """Calls torch's convolution as transformers' mixers do, and cuts its result as they do."""
    how = dict(padding=TAPS - 1, groups=CHANNELS) | how
    y = torch.nn.functional.conv1d(x, weight, **how)[:, :, : x.shape[-1]]
    return torch.nn.functional.silu(y)[:, :, -tokens:]


@pytest.mark.parametrize("begins", [False, True])
def test_a_causal_convolution_is_ours_and_its_gradient_has_tokens_as_rows(
    begins, monkeypatch
) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", DEVICE == "cpu")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    tokens = 9 + begins * (TAPS - 1)
    rows = torch.randn(2, tokens, CHANNELS, requires_grad=True, device=DEVICE)
    weight = torch.randn(CHANNELS, 1, TAPS, requires_grad=True, device=DEVICE)
    truth = convolved(rows.mT, weight, 9)
    dy = torch.randn(2, 9, CHANNELS, device=DEVICE)
    wanted = torch.autograd.grad(truth, (rows, weight), dy.mT)
    with OurConvolution(MixerCall(begins=begins)):
        ours = convolved(rows.mT, weight, 9)
    assert ours.mT.is_contiguous() and ours.shape == truth.shape
    torch.testing.assert_close(ours, truth)
    found = torch.autograd.grad(ours, (rows, weight), dy.mT)
    assert found[0].is_contiguous()
    for own, true in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, true)


def test_other_convolutions_stay_torchs() -> None:
    x, weight = torch.randn(1, CHANNELS, 9), torch.randn(CHANNELS, 1, TAPS)
    others: list[tuple[Tensor, Tensor, dict[str, Any]]] = [
        (x, weight, dict(padding=0, groups=CHANNELS)),
        (x, weight, dict(padding=TAPS - 1, groups=CHANNELS, stride=2)),
        (x, torch.randn(CHANNELS, CHANNELS, TAPS), dict(padding=TAPS - 1)),
        (x, torch.randn(CHANNELS, 1, 9), dict(padding=8, groups=CHANNELS)),
    ]
    for given, filters, how in others:
        with OurConvolution(MixerCall(begins=True)):
            found = torch.conv1d(given, filters, **how)
        assert torch.equal(found, torch.conv1d(given, filters, **how)), how


def test_cuts_that_take_less_stay_cuts() -> None:
    x = torch.randn(3, 4)
    with OurConvolution(MixerCall(begins=False)):
        assert x[:, -4:] is x
        assert x[:, -3:].shape == (3, 3) and x[1:, :].shape == (2, 4) and x[:, ::2].shape == (3, 2)
        assert x[0].shape == (4,) and x[:, None].shape == (3, 1, 4)


def test_a_gated_norm_is_ours_while_the_mixer_runs() -> None:
    norm = Qwen3_5RMSNormGated(8, eps=1e-6)
    x, gate = torch.randn(2, 5, 8)
    wanted = norm(x, gate)
    with our_gated_norm(norm):
        assert "forward" in vars(norm)
        torch.testing.assert_close(norm(x, gate), wanted)
    assert "forward" not in vars(norm)
    norm.forward = lambda x, gate: x  # somebody else's
    with our_gated_norm(norm), our_gated_norm(None):
        assert torch.equal(norm(x, gate), x)
    assert isinstance(norm, nn.Module) and "forward" in vars(norm)


SPEC = MixerSpec(
    hidden=1,
    path="mamba",
    module="MambaLayer",
    kind="mamba",
    gated_norm="norm",
    gate_first=True,
    state=(0, 0),
)
MAMBA: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoehybrid": (
        "GraniteMoeHybridMambaLayer",
        dict(mamba_n_heads=4, mamba_d_head=32, mamba_d_state=48, mamba_expand=2),
    ),
    "nemotron_h": (
        "NemotronHMamba2Mixer",
        dict(mamba_num_heads=4, mamba_head_dim=32, ssm_state_size=48, n_groups=2),
    ),
}


def mamba(kind: str) -> Any:
    name, sizes = MAMBA[kind]
    home = import_module(f"transformers.models.{kind}.modeling_{kind}")
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, hidden_size=64, num_hidden_layers=2, **sizes)
    module = getattr(home, name)(config, layer_idx=0)
    with torch.no_grad():
        for path, parameter in module.named_parameters():
            slow = path.endswith("A_log")  # a leak between segments shows
            parameter.copy_(
                parameter.new_tensor(-2.0) if slow else torch.randn(parameter.shape) / 5
            )
    return module.train()


def in_segments(module: Any, run: Any, n: Tensor, dy: Tensor) -> list[Tensor]:
    """Returns a mixer's output of a row in two segments, and the gradients of the row and of all
    parameters."""
    n, parameters = n.detach().requires_grad_(), dict(module.named_parameters())
    first, end = run(n[:, :70], (), parameters)
    second, _ = run(n[:, 70:], end, parameters)
    z = torch.cat([first, second], dim=1)
    return [z.detach(), *torch.autograd.grad(z, [n, *parameters.values()], dy.to(z.dtype))]


DRAWS = 4 if DEVICE == "cpu" else 40
"""Gradients of one number a head, in which most terms cancel, have errors that scatter by a factor
of 2 from draw to draw."""


@pytest.mark.parametrize(
    "kind", ["granitemoehybrid", pytest.param("nemotron_h", marks=pytest.mark.ci)]
)
def test_a_mamba_with_our_kernels_is_as_exact_as_in_plain_torch(kind, monkeypatch) -> None:
    """Naive is the scan's reference, which rounds as 16-bit kernels do: transformers' scan is in
    fp32. Errors are those of all draws together."""
    names = ["z", "dn", *dict(mamba(kind).named_parameters())]
    draws = zip(*(compared(kind, seed, monkeypatch) for seed in range(DRAWS)), strict=True)
    for name, found in zip(names, draws, strict=True):
        assert_exact(name, *(torch.stack(each) for each in zip(*found, strict=True)))


def compared(kind: str, seed: int, monkeypatch: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns what a mixer gives, and all gradients: ours, naive ones, and the truth."""
    module = mamba(kind).to(DEVICE)
    if seed:
        torch.manual_seed(seed)
    n, dy = torch.randn(2, 1, 100, 64, device=DEVICE).bfloat16()

    def theirs(n: Tensor, begin: Any, parameters: Any) -> Any:
        carried = Carried(begin)
        return module(hidden_states=n, cache_params=carried), carried.end

    def plain(n: Tensor, begin: Any, parameters: Any) -> Any:
        with our_functions(module, MixerCall(begins=bool(begin))):
            return theirs(n, begin, parameters)

    truth = in_segments(module.double(), theirs, n.double(), dy)
    module.to(torch.bfloat16)
    ran: list[Any] = []
    with monkeypatch.context() as changed:
        changed.setattr(launch, "INTERPRETED", DEVICE == "cpu")
        ours = in_segments(module, ModelsMixer(module, SPEC), n, dy)
        changed.setattr(mixer_kernels, "scan", lambda *x: ran.append(x) or scan_reference(*x))
        naive = in_segments(module, plain, n, dy)
    assert len(ran) == 2
    return [*zip(ours, naive, truth, strict=True)]


def test_another_scan_stays_transformers() -> None:
    """In fp32, as on a CPU, and after the mixer has run."""
    module = mamba("granitemoehybrid")
    home = import_module(type(module).__module__)
    theirs, n = home.mamba2_chunk_scan, torch.randn(1, 9, 64)
    wanted = module(n)
    call = MixerCall(begins=False)
    with our_functions(module, call), our_functions(nn.Linear(1, 1), call):
        assert home.mamba2_chunk_scan is not theirs
        assert torch.equal(module(n), wanted)
    assert home.mamba2_chunk_scan is theirs


def test_documents_that_something_in_a_mixer_did_not_read_are_refused() -> None:
    """Its module calls another function than the one that we replace, as another version may."""
    packed = RowDocuments(torch.tensor([0, 3, 7], dtype=torch.int32), 7)
    call = MixerCall(begins=False, packed=packed)
    with OurConvolution(call):
        torch.conv1d(torch.randn(1, 4, 7), torch.randn(4, 1, 3), padding=2, groups=4)
    call.check(["convolution"])
    with pytest.raises(RuntimeError, match="the recurrence of a mixer did not read where packed"):
        call.check(["convolution", "recurrence"])
    MixerCall(begins=False).check(["convolution"])
