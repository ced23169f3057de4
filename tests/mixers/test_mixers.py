"""Models with mixers, whole: losses and gradients beside Hugging Face's, which sees one document at
a time. The delta rule computes in fp32 whatever the dtype (but for tests/wide.py): in 16 bits the
median of errors over several batches is compared."""

from __future__ import annotations

import copy
import statistics
from contextlib import nullcontext
from typing import Any

import peft
import pytest
import torch
from small_families import (
    DECAYS,
    IN_TORCH_ALONE,
    MIXERS,
    every_mixer_runs,
    family_config,
    mix_documents_apart_,
    mixers_of,
)
from small_layer import DEVICE, Autocast, batch, cast, gradients, separate_rows, truth_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from wide import in_fp64

import longctx
from exactness import FACTOR, relative_error
from longctx.attention.documents import Documents
from longctx.calls import shared_prefixes
from longctx.calls.positions import keep_documents_apart
from longctx.cost.kept import asked
from longctx.cost.sizes import Batch
from longctx.cost.table import load
from longctx.errors import UserError
from longctx.families.families import base_of
from longctx.families.strangers import why_not_scheduled
from longctx.layer import segments as cutting
from longctx.memory.store import ActivationStore
from longctx.mixers import mixers
from longctx.mixers.mixers import ModelsMixer, why_slow
from longctx.runtime.costs import StepTable
from longctx.train.options.config import ModelArguments
from longctx.train.plan.subject import PlannedRun, Subject

pytestmark = [pytest.mark.usefixtures("reference_kernels"), IN_TORCH_ALONE]
MOST, MOST_OF_DECAYS = 2e-5, 1e-4
"""The gradients of decays are sums in which most terms cancel."""


@pytest.fixture(autouse=True)
def short_segments(monkeypatch) -> None:
    monkeypatch.setattr(cutting, "SEGMENT_TOKENS", 37)


def pair(
    family: str, dtype: torch.dtype = torch.float32, config: Any = None, **settings: Any
) -> tuple[Any, Any]:
    """(Hugging Face's, ours) with the same weights."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config or family_config(family)).train()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-3.0)  # so slow that a state which reaches another document shows
            else:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    theirs = cast(theirs, dtype).to(DEVICE)
    ours = longctx.patch(copy.deepcopy(theirs), strict=True, **settings)
    return apart(theirs), ours


def apart(model: Any) -> Any:
    keep_documents_apart(model)
    mix_documents_apart_(model)
    return model


def assert_equal(theirs: Any, ours: Any, inputs: dict[str, Any], *, wide: bool = True) -> None:
    """Ours in fp32 are theirs in fp64, or with `wide=False` theirs in fp32, which err as much."""
    with in_fp64(theirs) if wide else nullcontext():
        loss, grads = gradients(theirs, inputs)
    with every_mixer_runs(ours):
        own, found = gradients(ours, inputs)
    assert abs(own - loss) <= 1e-6 * loss
    assert_equal_gradients(found, grads)


def assert_equal_gradients(found: dict[str, Tensor], grads: dict[str, Tensor]) -> None:
    assert found.keys() == grads.keys()
    for name, grad in grads.items():
        most = MOST_OF_DECAYS if name.endswith(DECAYS) else MOST
        assert relative_error(found[name], grad) < most, name


ROWS = {"one": [[144]], "packed": [[60, 83, 1]], "rows": [[5, 43], [48], [16, 16, 16]]}


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        (family, rows)
        for n, family in enumerate(MIXERS)
        for rows in ("packed", ("one", "rows")[n % 2])
    ],
)
def test_loss_and_gradients_are_hugging_faces(family, rows, capsys) -> None:
    theirs, ours = pair(family, tile_tokens=31, head_groups=2)
    assert_equal(theirs, ours, batch(ROWS[rows]))
    assert "Hugging Face's layers" not in capsys.readouterr().out


@pytest.mark.parametrize(("turn", "family"), enumerate(MIXERS))
def test_no_bit_depends_on_what_is_kept_and_where(family, turn) -> None:
    """Each family keeps each set in one of two places, in turns."""
    inputs, found = batch([[26, 75, 1]]), []  # two chunks in a document; no error needs an average
    for n, keep in enumerate(("x", "o", "h", "qkv", "all"), turn):
        offload = ("none", "all")[n % 2]
        _, ours = pair(family, torch.bfloat16, keep=keep, offload_activations=offload)
        found.append(gradients(ours, inputs))
    loss, grads = found[0]
    for other, others in found[1:]:
        assert torch.equal(other, loss)
        assert all(torch.equal(others[name], grads[name]) for name in grads)


SIX = ["full_attention", *3 * ["linear_attention"], "full_attention", "linear_attention"]


def six_layers(**settings: Any) -> Any:
    config = family_config("olmo_hybrid", num_hidden_layers=6, layer_types=SIX)
    return pair("olmo_hybrid", config=config, tile_tokens=31, **settings)[1]


def test_no_state_is_overwritten_while_a_segment_needs_it() -> None:
    """Backward begins with the short document, whose tile is the first one, and the segments of the
    long one follow."""
    inputs, found = batch([[33, 80, 31]]), []
    for offload in ("none", "all"):
        found.append(gradients(six_layers(keep="o", offload_activations=offload), inputs))
    (loss, grads), (other, others) = found
    assert torch.equal(loss, other)
    assert [name for name in grads if not torch.equal(grads[name], others[name])] == []


@pytest.mark.parametrize("family", ["olmo_hybrid", "falcon_h1"])
def test_layers_run_forward_again(family) -> None:
    """Of three layers the lowest alone keeps its input."""
    _, ours = pair(family)
    inputs = batch(ROWS["packed"])
    loss, grads = gradients(ours, inputs)
    grads = {name: grad.clone() for name, grad in grads.items()}
    keep = type(ours.longctx.store.ladder[0])
    x = frozenset({"x"})
    ours.longctx.store.ladder = (keep(x), keep(frozenset()), keep(frozenset()))
    again, found = gradients(ours, inputs)
    assert torch.equal(loss, again) and all(torch.equal(found[n], grads[n]) for n in grads)


@pytest.mark.parametrize(
    ("family", "autocast"),
    [
        ("olmo_hybrid", False),
        *(pytest.param(name, True, marks=pytest.mark.ci) for name in ("olmo_hybrid", "falcon_h1")),
    ],
)
def test_in_bf16_the_median_error_is_theirs(family, autocast) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    theirs, ours = pair(family, dtype, tile_tokens=31)
    truth = apart(truth_of(ours_unpatched(theirs), torch.bfloat16))
    ratios: dict[str, list[float]] = {}
    for seed in range(1, 13):
        inputs, errors = batch(ROWS["packed"], seed), []
        exact = {name: grad.clone() for name, grad in gradients(truth, inputs)[1].items()}
        for model in (theirs, ours):
            found = gradients(Autocast(model) if autocast else model, inputs)[1]
            named = {name[6 * autocast :]: grad for name, grad in found.items()}
            errors.append({name: relative_error(named[name], exact[name]) for name in exact})
        for name in exact:  # of both layers together, and of what decides their decays
            kind = name.partition("layers.")[2][2:] or name
            kind = "decays" if name.endswith(("A_log", "dt_bias", "a_proj.weight")) else kind
            ratios.setdefault(kind, []).append(errors[1][name] / errors[0][name])
    typical = {kind: statistics.median(found) for kind, found in ratios.items()}
    # Decays have four numbers, whose errors are those of few tokens: over 80 draws the median is
    # 0.98, over these 24 it scatters by a sixth.
    assert typical.pop("decays") <= 1.3 and max(typical.values()) <= FACTOR, typical


def ours_unpatched(theirs: Any) -> Any:
    """A model of these weights in Hugging Face's code, without what a test has put there."""
    made = AutoModelForCausalLM.from_config(theirs.config).train()
    made.load_state_dict(theirs.state_dict())
    return made


@pytest.mark.parametrize("family", ["olmo_hybrid", "falcon_h1"])
def test_padding_is_left_out(family) -> None:
    """Hugging Face's mixers want it on the left."""
    theirs, ours = pair(family)
    inputs = batch([[48], [48]])
    mask = torch.ones(2, 48, dtype=torch.long)
    mask[1, :11] = 0
    inputs |= dict(attention_mask=mask, position_ids=None)
    inputs["labels"] = inputs["labels"].masked_fill(mask == 0, -100)
    assert_equal(theirs, ours, inputs)


@pytest.mark.parametrize("family", ["olmo_hybrid", "lfm2", "granitemoehybrid", "falcon_h1"])
def test_padding_between_real_tokens_runs_hugging_faces_layers(family, capsys) -> None:
    """States decay over it, and convolutions reach over it."""
    theirs, ours = pair(family)
    mask = torch.ones(2, 48, dtype=torch.long)
    mask[1, 11:14] = 0
    inputs = batch([[48], [48]]) | dict(attention_mask=mask.to(DEVICE), position_ids=None)
    with pytest.raises(UserError, match="padding between real tokens, which mixers take for zeros"):
        ours(**inputs)
    ours.longctx.surround(strict=False)
    expected, found = (gradients(model, inputs)[0] for model in (theirs, ours))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert "mixers take for zeros" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "count"),
    {"olmo_hybrid": 2, "lfm2": 2, "granitemoehybrid-experts": 2, "falcon_h1": 3}.items(),
)
def test_prompts_are_shared_by_their_states(family, count, monkeypatch) -> None:
    monkeypatch.setattr(shared_prefixes, "LEAST_TOKENS", 64)
    theirs, ours = pair(family, share_prefixes=True)
    ids = torch.randint(211, (1, 90))
    answers = [torch.cat([ids, torch.randint(211, (1, n))], 1) for n in (30, 7, 41)]
    rows = [dict(input_ids=a, position_ids=torch.arange(a.shape[1])[None]) for a in answers]
    inputs = {name: torch.cat([row[name] for row in rows], 1) for name in rows[0]}
    inputs |= dict(labels=inputs["input_ids"].masked_fill(inputs["position_ids"] < 90, -100))
    tokens = []
    run = ModelsMixer.__call__

    def counted(self: Any, n: Tensor, *args: Any, **how: Any) -> Any:
        tokens.append(n.shape[:2].numel())
        return run(self, n, *args, **how)

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(ModelsMixer, "__call__", counted)
        assert_equal(theirs, ours, inputs | {"use_cache": False})
    # Forward and backward: the prompt once, and some padding beside answers.
    found = sum(tokens) / (2 * count)
    assert 168 <= found < 200 < inputs["input_ids"].shape[1]


ANSWERED = Documents.of(
    [9, 7, 1, 1, 11, 1, 2, 6, 1, 1, 1, 40, 45],
    [None, 0, 0, None, 3, 3, None, 6, None, 8, None, None, 11],
    device=DEVICE,
)
"""Prompts of more tokens than convolutions reach back, of fewer, and of one; so are answers."""


@pytest.mark.parametrize("family", MIXERS)
def test_answers_are_those_of_separate_rows(family) -> None:
    assert_answers_are_separate(*pair(family, tile_tokens=31, head_groups=2))


def assert_answers_are_separate(theirs: Any, ours: Any) -> None:
    """Compares hidden states and gradients of a row of prompts with answers, in ours, with those of
    rows [prompt + answer], in theirs in fp64."""
    hidden = ours.config.hidden_size
    ids = torch.randint(211, (1, ANSWERED.tokens)).to(DEVICE)
    d = torch.randn(1, ANSWERED.tokens, hidden).to(DEVICE)
    truth, grads = torch.empty_like(d).double(), {}
    for model in (theirs, ours):
        model.zero_grad()
    with in_fp64(theirs):
        for tokens, known in separate_rows(ANSWERED):
            row = base_of(theirs)(input_ids=ids[:, tokens], use_cache=False).last_hidden_state
            own = tokens[known:]
            (row[:, known:] * d[:, own]).sum().backward()
            truth[:, own] = row[:, known:].detach()
        grads |= {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    with every_mixer_runs(ours):
        found = base_of(ours)(input_ids=ids, **ANSWERED.arguments()).last_hidden_state
        (found * d).sum().backward()
    assert relative_error(found, truth) < MOST
    own = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    assert_equal_gradients(own, grads)


# --- adapters --------------------------------------------------------------------------------

EVERY = {
    "olmo_hybrid": ["a_proj", "g_proj", "o_proj", "gate_proj", "down_proj"],
    "lfm2": ["in_proj", "out_proj", "w1", "w2", "w3"],
    "nemotron_h": ["in_proj", "o_proj", "up_proj", "down_proj"],  # PEFT refuses Mamba's out_proj
    "granitemoehybrid-experts": ["in_proj", "out_proj", "o_proj", "input_linear", "output_linear"],
    "falcon_h1": ["in_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],  # as for nemotron_h
}
"""Linear layers of the mixers, of attention and of MLPs."""


@pytest.mark.parametrize(
    ("family", "dora"), [*((name, False) for name in EVERY), ("olmo_hybrid", True)]
)
def test_adapters_in_a_frozen_mixer(family, dora) -> None:
    theirs, _ = pair(family)
    targets = [*EVERY[family], "q_proj", "k_proj", "v_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, use_dora=dora)
    torch.manual_seed(1)
    theirs = peft.get_peft_model(ours_unpatched(theirs), config)
    ours = longctx.patch(copy.deepcopy(theirs), strict=True)
    if not dora:
        assert_answers_are_separate(theirs.get_base_model(), ours.get_base_model())
    apart(theirs.get_base_model())
    assert_equal(theirs, ours, batch(ROWS["packed"]))
    trained = {name for name, p in ours.named_parameters() if p.requires_grad}
    assert all(any(f"{own}.lora_A" in name for name in trained) for own in targets)
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize("family", ["olmo_hybrid", "falcon_h1"])
def test_adapters_over_weights_in_nf4(family) -> None:
    quantised = pytest.importorskip("test_quantised").quantised
    theirs = ours_unpatched(pair(family)[0]).to(DEVICE)
    quantised(theirs)
    targets = [*EVERY[family], "q_proj", "k_proj", "v_proj"]
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    theirs = peft.get_peft_model(theirs, config)
    ours = longctx.patch(copy.deepcopy(theirs), strict=True, tile_tokens=31, head_groups=2)
    apart(theirs.get_base_model())
    assert_equal(theirs, ours, batch(ROWS["packed"]), wide=False)


def test_dropout_of_adapters_in_a_mixer_repeats_itself() -> None:
    """Backward draws forward's masks: a finite difference along the gradient says so."""
    theirs, _ = pair("olmo_hybrid")
    config = peft.LoraConfig(r=4, target_modules=["g_proj"], lora_dropout=0.5)
    ours = longctx.patch(peft.get_peft_model(ours_unpatched(theirs), config), strict=True)
    with torch.no_grad():
        for name, p in ours.named_parameters():
            if "lora_B" in name:
                p.copy_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    inputs = batch(ROWS["packed"])

    def loss() -> Tensor:
        torch.manual_seed(5)
        return ours(**inputs).loss

    loss().backward()
    trained = [p for p in ours.parameters() if p.grad is not None]
    size = torch.stack([p.grad.norm() for p in trained]).norm()
    step, found = 0.02, []
    for sign in (1, -1):
        with torch.no_grad():
            for p in trained:
                p.add_(p.grad, alpha=sign * step / size.item())
            found.append(loss().item())
            for p in trained:
                p.sub_(p.grad, alpha=sign * step / size.item())
    assert (found[0] - found[1]) / (2 * step) == pytest.approx(size.item(), rel=0.02)


# --- what is refused -------------------------------------------------------------------------


def test_what_the_schedule_does_not_run_joins_no_documents() -> None:
    _, ours = pair("olmo_hybrid")
    ours.longctx.surround(strict=False)
    ours.model.layers[0].mlp.act_fn.register_forward_hook(lambda *args: None)
    assert ours(**batch(ROWS["one"])).loss
    with pytest.raises(UserError, match="would join the documents of a packed row.*hooks on"):
        ours(**batch(ROWS["packed"]))


def test_ranks_share_no_rows() -> None:
    subject = Subject(family_config("olmo_hybrid"))
    run = PlannedRun(model=ModelArguments(seq_len=4096), gpus=2, sequence_parallel_size=2)
    from longctx.train.plan.step import check_ranks

    with pytest.raises(UserError, match="a state on from token to token"):
        check_ranks(subject.sizes(run), run.tokens)


def test_an_engine_that_brings_weights_module_by_module_is_a_stranger() -> None:
    """As ZeRO-3 does, whose hooks would take weights away within backward."""
    _, ours = pair("olmo_hybrid")

    def hook(*args: Any) -> None: ...

    hook.__module__ = "deepspeed.runtime.zero"
    handle = mixers_of(ours)[0].g_proj.register_forward_pre_hook(hook)
    assert "hooks inside model.layers.0.linear_attn" in str(why_not_scheduled(ours.model))
    handle.remove()
    mixers_of(ours)[0].g_proj.register_forward_hook(lambda *args: None)  # one of the user's own
    assert why_not_scheduled(ours.model) is None


def test_the_plan_of_hugging_faces_layers_is_unknown() -> None:
    with pytest.raises(UserError, match="has mixers, whose plan"):
        Subject(family_config("olmo_hybrid"), ModelArguments(class_type="vanilla"))


# --- what it costs ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["olmo_hybrid", "nemotron_h", "falcon_h1"])
def test_the_table_has_every_product(family) -> None:
    """But for those of the recurrence and the convolution, which are counted by their bytes."""
    _, ours = pair(family, keep="o", tile_tokens=144, head_groups=1)
    inputs = batch(ROWS["one"])
    ours(**inputs)  # sizes the store
    tables = StepTable.of(ours.longctx.sizes(ours), Batch(144, 144))
    with FlopCounterMode(display=False) as counter:
        ours(**inputs).loss.backward()
    counted = counter.get_flop_counts()["Global"]
    found = sum(n for op, n in counted.items() if str(op) in ("aten.mm", "aten.addmm"))
    works = [
        work for t in tables.layers for work in (*t.forward, *t.backward, *t.again(asked("o", t)))
    ]
    rows = int((inputs["labels"][:, 1:] != -100).sum())
    assert found == load(works).at("matmul") + 6 * rows * ours.lm_head.weight.numel()


@pytest.mark.parametrize("family", MIXERS)
def test_a_mixer_keeps_what_the_plan_counts(family) -> None:
    _, ours = pair(family, torch.bfloat16, keep="o")
    inputs = batch(ROWS["one"])
    loss = ours(**inputs).loss
    tables = StepTable.of(ours.longctx.sizes(ours), Batch(144, 144)).layers
    planned = sum(table.kept_bytes(asked("o", table)) for table in tables)
    held = sum(x.untyped_storage().nbytes() for x in ours.longctx.store.tensors_on_gpu())
    assert held <= planned <= held + 512 * 5 * len(tables)  # tensors of a layer, rounded up
    del loss


def test_a_line_says_what_is_not_installed(monkeypatch) -> None:
    _, ours = pair("olmo_hybrid")
    assert why_slow(ours.model, torch.device("cpu")) is None
    there: set[str] = set()
    monkeypatch.setattr(mixers, "installed", lambda module: module in there)
    line = why_slow(ours.model, torch.device("cuda")) or ""
    assert "pip install" in line and "flash-linear-attention" in line
    there.add("fla")
    assert why_slow(ours.model, torch.device("cuda")) is None


def test_a_line_says_that_heads_are_wider_than_our_kernels_take() -> None:
    _, ours = pair("granitemoehybrid")
    assert why_slow(ours.model, torch.device("cuda")) is None
    mamba = next(layer.mamba for layer in ours.model.layers if layer.mamba)
    mamba.head_dim = 256
    assert "256 columns" in (why_slow(ours.model, torch.device("cuda")) or "")
    mamba.head_dim, mamba.ssm_state_size = 64, 40
    assert "states of 40" in (why_slow(ours.model, torch.device("cuda")) or "")


def test_copies_of_the_layer_below_come_up_across_kinds(monkeypatch) -> None:
    """Some tensors of each layer are on their way when its backward begins, also below a layer of
    another kind."""
    ours = six_layers(keep="o", offload_activations="all")
    inputs, coming = batch(ROWS["one"]), []
    load = ActivationStore.load

    def loaded(self: Any, *args: Any) -> Any:
        coming.append({name for name, _ in self._coming})
        return load(self, *args)

    monkeypatch.setattr(ActivationStore, "load", loaded)
    gradients(ours, inputs)
    on_gpu, first, *below = coming  # nothing of the last layer is on the host
    made = [names & {"o", "z"} for names in below]  # by attention, or by a mixer
    assert on_gpu == first == set() and all("x" in names for names in below) and all(made), below
