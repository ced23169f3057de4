"""A mixer alone in a layer, h = x + r module(norm(x)), beside the module's own forward over one
document at a time. The modules are those of transformers, with a decay so slow that a state which
reaches another document shows."""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from pairs import pairs
from small_families import IN_TORCH_ALONE
from torch import Tensor, nn
from transformers import AutoConfig

from exactness import relative_error
from longctx.attention.backends import choose_attention
from longctx.attention.documents import Documents
from longctx.cost.dims import LayerSpec
from longctx.cost.kept import Keep
from longctx.layer import segments as cutting
from longctx.layer.norm_spec import NormSpec
from longctx.layer.passes import Schedule
from longctx.layer.schedule import scheduled_layer
from longctx.layer.segments import kept_states, segments
from longctx.layer.specs.mixer_spec import MixerSpec
from longctx.memory.store import ActivationStore
from longctx.mixers.mixers import Carried, ModelsMixer

pytestmark = [pytest.mark.usefixtures("reference_kernels"), IN_TORCH_ALONE]
D, EPS = 32, 1e-6
CPU = torch.device("cpu")


class Kind(NamedTuple):
    """Where a module is, and the configuration that it is made of."""

    model: str
    name: str
    config: dict[str, Any]
    cache: str = "cache_params"
    type: str = ""
    """The name of its configuration, if it is another than the model's."""


_DELTA = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"],
)
_MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=16)
_MAMBA |= dict(mamba_expand=2, mamba_n_groups=1, mamba_proj_bias=True)
_FALCON = _MAMBA | dict(mamba_d_ssm=64, mamba_rms_norm=True, mamba_norm_before_gate=False)
KINDS = {
    "olmo_hybrid": Kind("olmo_hybrid", "OlmoHybridGatedDeltaNet", _DELTA),
    "qwen3_5": Kind("qwen3_5", "Qwen3_5GatedDeltaNet", _DELTA, type="qwen3_5_text"),
    "qwen3_next": Kind("qwen3_next", "Qwen3NextGatedDeltaNet", _DELTA),
    "granite": Kind("granitemoehybrid", "GraniteMoeHybridMambaLayer", _MAMBA),
    "nemotron_h": Kind(
        "nemotron_h",
        "NemotronHMamba2Mixer",
        dict(mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=1, chunk_size=16),
    ),
    "lfm2": Kind(
        "lfm2",
        "Lfm2ShortConv",
        dict(layer_types=["conv", "full_attention"], conv_bias=True),
        "past_key_values",
    ),
    "falcon_h1": Kind("falcon_h1", "FalconH1Mixer", _FALCON),
    "falcon_h1, gate last": Kind(
        "falcon_h1", "FalconH1Mixer", _FALCON | dict(mamba_norm_before_gate=True)
    ),
}


@cache
def made(kind: str) -> nn.Module:
    model, name, config, _, type = KINDS[kind]
    sizes = dict(hidden_size=D, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    home = import_module(f"transformers.models.{model}.modeling_{model}")
    given = AutoConfig.for_model(type or model, **sizes | config)
    module = getattr(home, name)(given, layer_idx=0)
    if model == "falcon_h1":  # a whole model gives its mixers their factors
        module.register_buffer("mup_vector", home.compute_mup_vector(given))
    with torch.no_grad():
        for own, parameter in module.named_parameters():
            if own.endswith("A_log"):
                parameter.fill_(-3.0)
            else:
                parameter.copy_(0.3 * torch.randn(parameter.shape))
    return module.train()


SPEC_KINDS = {
    "lfm2": "convolution",
    **dict.fromkeys(("granite", "nemotron_h", "falcon_h1"), "mamba"),
}
DELTA_NET = MixerSpec(
    hidden=1,
    path="linear_attn",
    module="GatedDeltaNet",
    kind="delta rule",
    package="fla",
    gated_norm="norm",
    state=(0, 0),
)


def schedule(documents: Documents, keep: Keep, residual: float = 1.0, **changes: Any) -> Schedule:
    store = ActivationStore(CPU)
    store.reserve((keep,), 2**22)
    tokens = documents.tokens
    return Schedule(
        layers=(LayerSpec(parts=(replace(DELTA_NET, factor=residual),)),),
        documents=documents,
        position_ids=torch.arange(tokens),
        ropes={},
        query_scale=None,
        head_dim=4,
        norm=NormSpec(eps=EPS),
        attention=choose_attention("math", CPU, torch.float32)[1],
        store=store,
        tile_tokens=8,
        head_groups=1,
        dtype=torch.float32,
        **changes,
    )


BOTH = frozenset({"x", "o"})
X, MADE, HOSTED = Keep(frozenset({"x"})), Keep(BOTH), Keep(BOTH, BOTH)
Found = dict[str, Tensor]


def drawn(tokens: int) -> tuple[Tensor, ...]:  # x, dy, the norm's weight
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(2, tokens, D, generator=generator)
    return x, dy, 1 + 0.3 * torch.randn(D, generator=generator)


def ours(
    kind: str, documents: Documents, keep: Keep = X, module: Any = None, residual: float = 1.0
) -> Found:
    module = made(kind) if module is None else module
    x, dy, weight = (t.requires_grad_() for t in drawn(documents.tokens))
    own = {f"mixer.{name}": p for name, p in module.named_parameters()}
    w = {"norm1": weight, **own}
    spec = replace(DELTA_NET, cache=KINDS[kind].cache, gated_norm="")
    mixes = ModelsMixer(module, replace(spec, kind=SPEC_KINDS.get(kind, "delta rule")))
    how = schedule(documents, keep, residual, packs=mixes.packs)
    y = scheduled_layer(x, how, 0, w, mixes=mixes)
    trained = {"x": x, **{n: p for n, p in w.items() if p.requires_grad}}
    grads = torch.autograd.grad(y, [*trained.values()], dy)
    return {"y": y.detach(), **dict(zip(trained, grads, strict=True))}


def theirs(kind: str, documents: Documents, module: Any = None, residual: float = 1.0) -> Found:
    """The module's own forward, without a cache: a document behind its parent's tokens."""
    module = made(kind) if module is None else module
    x, dy, weight = (t.requires_grad_() for t in drawn(documents.tokens))
    n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
    places = [*documents.slices()]
    parts = []
    for i, own in enumerate(places):
        parent = documents.parents[i] if documents.parents else None
        before = n[:0] if parent is None else n[places[parent]]
        row = torch.cat([before, n[own]])
        # Falcon-H1's norm takes a dimension of a row of one token away.
        parts.append(module(row[None]).view_as(row)[len(before) :])
    y = x + residual * torch.cat(parts)
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    trained = [x, weight, *(p for p in module.parameters() if p.requires_grad)]
    grads = torch.autograd.grad(y, trained, dy)
    return {
        "y": y.detach(),
        **dict(zip(["x", "norm1", *(f"mixer.{n}" for n in names)], grads, strict=True)),
    }


def assert_equal(found: Found, truth: Found, most: float = 2e-5) -> None:
    assert found.keys() == truth.keys()
    wrong = {n: relative_error(found[n], truth[n]) for n in truth}
    assert max(wrong.values()) < most, wrong


ONE = Documents.of([101])
PACKED = Documents.of([50, 7, 1, 33, 2, 40, 38])
SHARED = Documents.of(
    [29, 7, 1, 33, 12, 5, 3, 1, 11, 1, 9, 2, 6, 1, 1, 1],
    parents=[None, 0, 0, 0, None, 4, 4, None, 7, 7, 7, None, 11, None, 13, None],
)
"""Prompts of more tokens than convolutions reach back, of fewer, and of one; so are answers."""


@pytest.mark.parametrize(
    ("kind", "documents", "length"), pairs([*KINDS], [ONE, PACKED, SHARED], [16384, 40, 23])
)
def test_every_module_in_segments(monkeypatch, kind, documents, length) -> None:
    """Of lengths that divide nothing; documents share no state, and answers have their prompt's."""
    monkeypatch.setattr(cutting, "SEGMENT_TOKENS", length)
    assert_equal(ours(kind, documents), theirs(kind, documents))


def test_a_leak_would_show() -> None:
    joined = theirs("olmo_hybrid", Documents.of([PACKED.tokens]))["y"]
    assert relative_error(joined, theirs("olmo_hybrid", PACKED)["y"]) > 0.1


@pytest.mark.parametrize("documents", [ONE, PACKED], ids=["one", "packed"])
def test_no_bit_depends_on_what_is_kept(monkeypatch, documents) -> None:
    monkeypatch.setattr(cutting, "SEGMENT_TOKENS", 23)
    first, *others = (ours("qwen3_5", documents, keep) for keep in (X, MADE, HOSTED))
    for other in others:
        assert all(torch.equal(other[name], first[name]) for name in first)


def test_a_factor_of_the_output() -> None:
    assert_equal(ours("granite", ONE, residual=0.22), theirs("granite", ONE, residual=0.22))


@pytest.mark.parametrize("trained", [(), ("out_proj.weight",), ("A_log", "conv1d.weight")])
def test_only_what_is_trained_has_a_gradient(monkeypatch, trained) -> None:
    monkeypatch.setattr(cutting, "SEGMENT_TOKENS", 23)
    module = copy.deepcopy(made("qwen3_5"))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trained)
    found = ours("qwen3_5", ONE, module=module)
    assert {n for n in found if n.startswith("mixer.")} == {f"mixer.{n}" for n in trained}
    assert_equal(found, theirs("qwen3_5", ONE, module=module))


def test_hooks_of_parameters_see_whole_gradients_only(monkeypatch) -> None:
    monkeypatch.setattr(cutting, "SEGMENT_TOKENS", 23)
    module, seen = copy.deepcopy(made("qwen3_5")), []
    module.out_proj.weight.register_hook(lambda grad: seen.append(grad.clone()))
    found = ours("qwen3_5", ONE, module=module)
    assert len(seen) == 1 and torch.equal(seen[0], found["mixer.out_proj.weight"])


class Dropped(nn.Module):
    """A module with dropout in it, as an adapter has."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.dropout, self.masks = module, nn.Dropout(0.5), []

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        dropped = self.dropout(torch.ones_like(hidden_states))
        self.masks.append(dropped.detach().clone())
        return self.module(hidden_states * dropped, **kwargs)


def test_dropout_draws_the_same_masks_again_and_others_in_each_segment(monkeypatch) -> None:
    monkeypatch.setattr(cutting, "SEGMENT_TOKENS", 40)
    module = Dropped(made("qwen3_5"))
    torch.manual_seed(3)
    ours("qwen3_5", ONE, module=module)
    after = torch.rand(3)
    a, b, c, *again = module.masks
    assert all(torch.equal(x, y) for x, y in zip(again[:3], (a, b, c), strict=True))
    assert all(torch.equal(x, y) for x, y in zip(again[3:], (c, b, a), strict=True))
    assert not torch.equal(a[:, :33], b[:, :33])
    torch.manual_seed(3)
    ours("qwen3_5", ONE, module=module)
    assert torch.equal(module.masks[6 + 3], a) and torch.equal(torch.rand(3), after)
    ours("qwen3_5", ONE, module=module)
    assert not torch.equal(module.masks[2 * (6 + 3)], a)


def test_the_graph_has_one_segment(monkeypatch) -> None:
    """What backward holds at most, in tensors that graphs save, does not grow with the row."""
    monkeypatch.setattr(cutting, "SEGMENT_TOKENS", 64)
    most = []
    for tokens in (128, 512):
        alive: weakref.WeakSet[Saved] = weakref.WeakSet()
        peak = [0]

        def pack(x: Tensor, alive=alive, peak=peak) -> Saved:
            alive.add(saved := Saved(x))
            peak[0] = max(peak[0], len(alive))
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            ours("qwen3_5", Documents.of([tokens]))
        most.append(peak[0])
    assert most[0] > 20 and most[1] <= 1.1 * most[0]


class Saved:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


# --- what reaches the kernels ----------------------------------------------------------------


def test_a_kernel_sees_documents_apart_and_their_own_state(monkeypatch) -> None:
    """A stub in the place of flash-linear-attention's function, which is handed what it has in its
    signature: shapes, the state that it begins with, and no bounds, which its kernels would read on
    the host."""
    home = import_module("transformers.models.olmo_hybrid.modeling_olmo_hybrid")
    run, seen = home.torch_chunk_gated_delta_rule, []

    def stub(q: Tensor, *args: Any, initial_state: Any = None, **kwargs: Any) -> Any:
        seen.append((tuple(q.shape[:2]), initial_state is None, kwargs.get("cu_seqlens")))
        return run(q, *args, initial_state=initial_state, **kwargs)

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("its kernel has no gradient")

    monkeypatch.setattr(home, "torch_chunk_gated_delta_rule", stub)
    monkeypatch.setattr(home, "torch_recurrent_gated_delta_rule", never)
    monkeypatch.setattr(home, "causal_conv1d_update", never)
    monkeypatch.setattr(cutting, "SEGMENT_TOKENS", 40)
    documents = Documents.of([81, 18, 20, 5, 20, 1], parents=[None, 0, None, 2, None, None])
    assert_equal(ours("olmo_hybrid", documents), theirs_unstubbed(home, run, documents))
    forward = seen[: len(seen) // 3]  # without z backward runs forward again, then with a graph
    assert forward == [
        *(((1, 27), begins, None) for begins in (True, False, False)),
        ((1, 20), True, None),  # a prompt
        ((1, 128), True, None),  # two documents, in a chunk of 64 places each
        ((1, 18), False, None),  # answers
        ((1, 5), False, None),
    ]


def theirs_unstubbed(home: Any, run: Any, documents: Documents) -> Found:
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(home, "torch_chunk_gated_delta_rule", run)
        return theirs("olmo_hybrid", documents)


# --- the cut into segments -------------------------------------------------------------------


def test_segments_of_the_modules_example() -> None:
    cut = segments(Documents.of([40000, 900, 1000, 800]), 16384)
    assert [s.rows for s in cut[:3]] == [
        (slice(0, 13333),),
        (slice(13333, 26666),),
        (slice(26666, 40000),),
    ]
    assert [s.begins for s in cut] == [None, 0, 1, None] and kept_states(cut) == [0, 1]
    assert cut[3].length == 1000 and [s.stop - s.start for s in cut[3].rows] == [1000, 900, 800]


def test_every_token_is_in_one_segment_and_little_is_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 3000, (200,), generator=generator).tolist()
    documents = Documents.of(lengths)
    cut = segments(documents, 16384)
    tokens = sorted(t for s in cut for row in s.rows for t in range(row.start, row.stop))
    assert tokens == [*range(documents.tokens)]
    computed = sum(len(s.rows) * s.length for s in cut)
    assert computed <= documents.tokens / (1 - cutting.MOST_PADDING)
    assert max(len(s.rows) * s.length for s in cut) <= 16384 and len(cut) < 60


def test_a_state_holds_no_more_than_itself() -> None:
    """Else every segment's inputs of the convolution would be there until the row is over."""
    carried = Carried(())
    x = torch.randn(1, 8, 500)
    assert carried.update_conv_state(x, 0, conv_kernel_size=4) is x
    (state,) = carried.end
    assert state.shape == (1, 8, 3) and state.untyped_storage().nbytes() == 1 * 8 * 3 * 4
