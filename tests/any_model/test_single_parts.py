"""Single kernels of ours in Hugging Face's layers: each as exact as Hugging Face's, on one instance
alone, and undone."""

from __future__ import annotations

import copy
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from small_families import FIRST_OF_EACH, delta_rule_in_fp64, family_config
from small_layer import PACKED, assert_settings_train_exactly, batch, cast, gradients, truth_of
from small_model import CPU, packed_batch, tiny_config
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LlamaModel
from transformers.models.llama import modeling_llama

import longctx
from exactness import DEVICE
from longctx.any_model import parts
from longctx.any_model.parts import why_not_part
from longctx.errors import UserError
from longctx.forwards import causal
from longctx.patching.patch import check_parts, patch_as
from longctx.settings import FUSED, PARTS, WHOLE, PatchOptions

pytestmark = pytest.mark.usefixtures("reference_kernels")
DEVICE = torch.device(DEVICE)


def trio(family: str, dtype: torch.dtype, settings=None):
    """(truth, naive, ours) with the same weights, rounded to `dtype`."""
    torch.manual_seed(0)
    naive = AutoModelForCausalLM.from_config(family_config(family)).train()
    with torch.no_grad():
        for parameter in naive.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    naive = cast(naive.to(DEVICE), dtype)
    ours = copy.deepcopy(naive)
    patch_as(ours, PatchOptions(**(settings or {})), DEVICE)
    return truth_of(naive, dtype), naive, ours


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(**changes)).train()


# --- numbers ---------------------------------------------------------------------------------

ALONE = {
    "llama": ("rope", "rms_norm", "swiglu", WHOLE, FUSED),
    "gemma2": ("rms_norm", "geglu", FUSED),  # whose logits have a cap
    "cohere": ("layer_norm", WHOLE),  # whose logits have a scale
}


@pytest.mark.parametrize(
    ("family", "dtype", "part"),
    [
        (family, dtype, part)
        for family, parts in ALONE.items()
        for dtype in (torch.float32, torch.bfloat16)
        for part in parts
        if dtype == torch.float32 or family == "llama" or part == "geglu"
    ],
)
def test_a_part_is_as_exact_as_theirs(family, part, dtype, scheduled) -> None:
    assert_settings_train_exactly(trio, family, dtype, settings={"parts": (part,)})
    assert scheduled == []


@pytest.mark.parametrize("family", FIRST_OF_EACH)
def test_all_parts_that_a_family_takes(family) -> None:
    """In fp32, where the order of sums is all that differs."""
    torch.manual_seed(0)
    vanilla = AutoModelForCausalLM.from_config(family_config(family)).train()
    taken = [p for p in PARTS if p != WHOLE and why_not_part(vanilla.config, p) is None]
    fewer = family in ("nemotron", "nemotron_h", "starcoder2", "cohere", "gpt_oss", "ernie4_5_moe")
    assert FUSED in taken and len(taken) >= 3 - fewer
    ours = longctx.patch(copy.deepcopy(vanilla), parts=taken)
    with delta_rule_in_fp64():
        (loss, grads), (truth, truths) = (gradients(m, batch(PACKED)) for m in (ours, vanilla))
    torch.testing.assert_close(loss, truth, rtol=2e-6, atol=0)
    for name, grad in truths.items():
        assert (grads[name] - grad).norm() <= 2e-5 * grad.norm() + 1e-9, name


def test_the_kernels_run_and_nobody_elses_model_has_them(monkeypatch) -> None:
    """Each kernel is called once a module; another model of the class runs transformers' code."""
    calls = dict.fromkeys(("final_norm", "swiglu", "apply_rotary_pos_emb", "cross_entropy"), 0)
    for name in calls:
        run = getattr(parts, name)

        def counted(*args: Any, name: str = name, run: Any = run, **kwargs: Any) -> Any:
            calls[name] += 1
            return run(*args, **kwargs)

        monkeypatch.setattr(parts, name, counted)
    before = vars(modeling_llama).copy()
    ours, other = llama(), llama()
    longctx.patch(ours, parts=("rope", "rms_norm", "swiglu", WHOLE))
    other(**packed_batch()).loss.backward()
    assert set(calls.values()) == {0}
    ours(**packed_batch()).loss.backward()
    assert calls == dict(final_norm=5, swiglu=2, apply_rotary_pos_emb=2, cross_entropy=1)
    assert all(vars(modeling_llama)[name] is value for name, value in before.items())


def test_only_the_fused_loss_makes_no_logits(monkeypatch) -> None:
    ours, vanilla = longctx.patch(llama(), parts=[FUSED]), llama()

    def read(*args: Any) -> None:
        raise AssertionError("somebody reads logits")

    monkeypatch.setattr(causal, "_logits", read)
    assert ours(**packed_batch()).loss.item() == pytest.approx(
        vanilla(**packed_batch()).loss.item(), rel=1e-6
    )
    assert "forward" not in vars(ours.model) and "forward" not in vars(ours.model.layers[0])


def test_logits_are_theirs_until_backward() -> None:
    """The gradient takes their memory then."""
    ours, vanilla = longctx.patch(llama(), parts=[WHOLE]), llama()
    found, truth = (model(**packed_batch()) for model in (ours, vanilla))
    assert torch.equal(found.logits, truth.logits)
    found.loss.backward()
    assert found.logits.sum(-1).abs().max() < 1e-6 < found.logits.abs().max()


def test_gradient_checkpointing_is_theirs() -> None:
    """Each layer runs twice, and gradients are the same bits."""
    runs: list[int] = []
    ours = longctx.patch(llama(), parts=["rope", "rms_norm", "swiglu", FUSED])
    _, grads = gradients(ours, packed_batch())
    kept = {name: grad.clone() for name, grad in grads.items()}
    ours.gradient_checkpointing_enable()
    ours.model.layers[1].mlp.register_forward_pre_hook(lambda *args: runs.append(1))
    _, again = gradients(ours, packed_batch())
    assert len(runs) == 2
    assert all(torch.equal(again[name], grad) for name, grad in kept.items())


@pytest.mark.parametrize("items", [7, torch.tensor(113)], ids=["int", "tensor"])
def test_num_items_in_batch(items) -> None:
    ours, vanilla = longctx.patch(llama(), parts=[WHOLE]), llama()
    inputs = {**packed_batch(), "num_items_in_batch": items}
    torch.testing.assert_close(ours(**inputs).loss, vanilla(**inputs).loss)


def test_generation_and_evaluation() -> None:
    ours, vanilla = longctx.patch(llama(), parts=["rope", "rms_norm", "swiglu", FUSED]), llama()
    ids = packed_batch()["input_ids"][:1, :9]
    made = [m.eval().generate(ids, max_new_tokens=5, do_sample=False) for m in (ours, vanilla)]
    assert torch.equal(*made)


# --- undone, saved, copied -------------------------------------------------------------------


def test_unpatch() -> None:
    ours = longctx.patch(llama(), parts=["rope", "rms_norm", "swiglu", WHOLE])
    longctx.unpatch(ours)
    assert not [name for name, module in ours.named_modules() if "forward" in vars(module)]
    assert ours.loss_function.__name__ == "ForCausalLMLoss"
    longctx.patch(ours, parts=[FUSED])
    assert torch.isfinite(ours(**packed_batch()).loss)


def test_a_copy_has_the_parts() -> None:
    """A copied model runs the kernels on its own modules, also after their weights change."""
    ours = longctx.patch(llama(), parts=["rope", "rms_norm", "swiglu", WHOLE])
    ours.longctx.surround(label_smoothing=0.0)
    theirs = copy.deepcopy(ours)
    with torch.no_grad():
        ours.model.norm.weight.zero_()
    assert theirs(**packed_batch()).loss.item() != ours(**packed_batch()).loss.item()
    assert theirs.model.norm.forward.__self__ is theirs.model.norm
    assert theirs.loss_function._model() is theirs


def test_label_smoothing_is_of_either_loss() -> None:
    found = {}
    for part in (WHOLE, FUSED):
        ours = longctx.patch(llama(), parts=[part])
        ours.longctx.surround(label_smoothing=0.2)
        found[part] = ours(**packed_batch()).loss.item()
    assert found[WHOLE] == pytest.approx(found[FUSED], rel=1e-6)
    assert found[WHOLE] != pytest.approx(llama()(**packed_batch()).loss.item(), rel=1e-4)


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["rmsnorm"], "patch: parts has no part 'rmsnorm'; did you mean rms_norm?"),
        (["flce"], "patch: parts has no part 'flce'; did you mean"),
        ([], "patch: parts is empty"),
        ("rope", r"takes 'schedule' or a collection of parts, as \['rope'\]"),
        (["schedule", "rope"], "'schedule' has all parts and stands alone"),
        ([WHOLE, FUSED], "computes the loss over logits, .* without them: give one"),
        (["geglu"], "geglu is not for models of 'llama': its MLP is of swiglu"),
        (["layer_norm"], "layer_norm is not for models of 'llama': its norms are RMSNorms"),
    ],
)
def test_what_is_no_part_of_llama(given, line) -> None:
    model = llama()
    with pytest.raises(UserError, match=line):
        longctx.patch(model, parts=given)
    assert longctx.patch(model)  # nothing was left behind


@pytest.mark.parametrize(
    ("family", "part", "line"),
    [
        ("glm", "rope", "its RoPE rotates neighbours"),
        ("gpt_oss", "rope", "its cosines and sines have half the columns"),
        ("cohere", "rms_norm", "its norms are LayerNorms: layer_norm"),
        ("nemotron", "swiglu", "its MLP has no gate"),
    ],
)
def test_what_is_no_part_of_others(family, part, line) -> None:
    assert line in str(why_not_part(family_config(family), part))


def test_parts_of_what_is_not_theirs() -> None:
    with pytest.raises(UserError, match="cross_entropy: LlamaModel has no lm_head"):
        longctx.patch(LlamaModel(tiny_config()), parts=[WHOLE])
    with pytest.raises(UserError, match="act_fn, a .*GELUActivation, has a forward that"):
        longctx.patch(llama(hidden_act="gelu"), parts=["swiglu"])
    model = llama()
    model.loss_function = lambda logits, labels, **kwargs: logits.sum()
    with pytest.raises(UserError, match="a loss or a forward of its own"):
        longctx.patch(model, parts=["rope", WHOLE])
    assert "forward" not in vars(model.model.layers[0].self_attn)


def test_options_of_the_schedule() -> None:
    with pytest.raises(UserError, match="patch: keep is of the schedule, and parts run without it"):
        longctx.patch(llama(), parts=["rope"], keep="x")


def test_what_is_printed(capsys) -> None:
    longctx.patch(llama(), parts=["rms_norm", FUSED])
    assert capsys.readouterr().out == (
        "longctx patched: rms_norm, fused_linear_cross_entropy, in Hugging Face's layers\n"
    )
    said = patch_as(llama(), PatchOptions(parts=("rope",)), CPU)
    assert said == "patched: rope, in Hugging Face's layers"


# --- Liger-Kernel's --------------------------------------------------------------------------


@pytest.fixture
def ligers(monkeypatch) -> list[dict[str, Any]]:
    """The arguments of each call of a stand-in for Liger-Kernel's function that patches Llama."""
    calls: list[dict[str, Any]] = []

    def apply(
        rope: bool = True,
        cross_entropy: bool = False,
        fused_linear_cross_entropy: bool = True,
        rms_norm: bool = True,
        swiglu: bool = True,
        model: Any = None,
    ) -> None:
        given = dict(rope=rope, rms_norm=rms_norm, swiglu=swiglu)
        calls.append({**given, WHOLE: cross_entropy, FUSED: fused_linear_cross_entropy})

    for name in ("liger_kernel", "liger_kernel.transformers"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    table = SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": apply})
    module.monkey_patch = table
    return calls


def test_ligers_switches(ligers) -> None:
    for given in (None, ("rope", WHOLE)):
        said = patch_as(llama(), PatchOptions(class_type="liger", parts=given), CPU)
    assert ligers[0] == {name: name != WHOLE for name in ligers[0]}
    assert ligers[1] == {name: name in ("rope", WHOLE) for name in ligers[0]}
    assert said == "patched by Liger-Kernel: rope, cross_entropy; sdpa attention"
    wrong = PatchOptions(class_type="liger", parts=("geglu",))
    with pytest.raises(UserError, match="--parts of Liger-Kernel for 'llama' has no part 'geglu'"):
        check_parts("--parts", wrong, tiny_config())
