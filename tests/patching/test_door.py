"""What strangers do with a patched model: each equal to Hugging Face's, or a clear error. That the
schedule ran, and Hugging Face's layers did not, is asserted each time."""

from __future__ import annotations

import copy
import gc
import io
import pprint
import weakref
from typing import Any

import pytest
import torch
from small_model import packed_batch, tiny_config
from small_run import on_ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithFlattening,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlamaModel,
)

import longctx
from longctx.errors import UserError
from longctx.head import logits
from longctx.patching.patch import OPTIONS, patch_as
from longctx.settings import PatchOptions
from longctx.train.options.config import ModelArguments

pytestmark = pytest.mark.usefixtures("reference_kernels")
Batch = dict[str, Any]


def pair(**changes: Any) -> tuple[Any, Any]:
    """Vanilla and a patched copy of it, training."""
    torch.manual_seed(0)
    vanilla = LlamaForCausalLM(tiny_config(**changes)).train()
    with torch.no_grad():
        for parameter in vanilla.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return vanilla, longctx.patch(copy.deepcopy(vanilla))


def gradients(model: Any) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(vanilla: Any, ours: Any, loss: Any) -> None:
    """`loss(model)` and every gradient are equal but for the order of sums."""
    found = []
    for model in (vanilla, ours):
        model.zero_grad()
        value = loss(model)
        value.backward()
        found.append((value.detach(), gradients(model)))
    (truth, truths), (value, grads) = found
    torch.testing.assert_close(value, truth, rtol=2e-6, atol=1e-7)
    assert grads.keys() == truths.keys()
    for name, grad in truths.items():
        assert (grads[name] - grad).norm() <= 1e-5 * grad.norm() + 1e-9, name


def row(**more: Any) -> Batch:
    """One row of 48 tokens without documents."""
    batch = {**packed_batch(rows=1), "position_ids": torch.arange(48)[None], **more}
    return {name: value for name, value in batch.items() if value is not None}


# --- who calls it, and how -------------------------------------------------------------------


def test_the_base_model_alone(scheduled) -> None:
    """As TRL: hidden states of the base model, and a loss of one's own."""
    vanilla, ours = pair()
    batch = {k: v for k, v in packed_batch().items() if k != "labels"}

    def loss(model: Any) -> Tensor:
        hidden = model.model(**batch).last_hidden_state
        return (model.lm_head.weight[:5] @ hidden.mT).square().mean()

    assert_same(vanilla, ours, loss)
    assert scheduled == [96, 96]


def test_a_classifier(scheduled) -> None:
    torch.manual_seed(0)
    vanilla = AutoModelForSequenceClassification.from_config(tiny_config(pad_token_id=0)).train()
    ours = longctx.patch(copy.deepcopy(vanilla))
    ids = packed_batch()["input_ids"]
    assert_same(vanilla, ours, lambda m: m(input_ids=ids, labels=torch.tensor([0, 1])).loss)
    assert scheduled


def test_a_base_model_of_its_own(scheduled) -> None:
    torch.manual_seed(0)
    vanilla = LlamaModel(tiny_config()).train()
    ours = longctx.patch(copy.deepcopy(vanilla))
    ids = packed_batch()["input_ids"]
    assert_same(vanilla, ours, lambda m: m(input_ids=ids).last_hidden_state[..., :5].exp().mean())
    assert scheduled


def test_a_loss_of_the_logits(scheduled) -> None:
    vanilla, ours = pair()
    batch = {k: v for k, v in packed_batch().items() if k != "labels"}
    assert_same(vanilla, ours, lambda m: m(**batch).logits.logsumexp(-1).mean())
    assert scheduled == [96, 96]


@pytest.mark.parametrize("extra", ["bounds", "seq_idx"])
def test_the_flattening_collator(scheduled, extra) -> None:
    vanilla, ours = pair()
    collator = DataCollatorWithFlattening(
        return_flash_attn_kwargs=extra == "bounds", return_seq_idx=extra == "seq_idx"
    )
    rows = [{"input_ids": list(range(3, 3 + n)), "labels": list(range(3, 3 + n))} for n in (9, 30)]
    batch = {**collator(rows), "use_cache": False}  # with a cache vanilla looks for no documents
    assert_same(vanilla, ours, lambda m: m(**batch).loss)
    assert scheduled == [39, 39]


def test_bounds_without_positions(scheduled) -> None:
    """Positions go on over the row, and attention does not."""
    vanilla, ours = pair()
    batch = row(position_ids=None, cu_seq_lens_q=torch.tensor([0, 20, 48], dtype=torch.int32))
    mask = torch.ones(48, 48, dtype=torch.bool).tril()
    mask[20:, :20] = False
    dense = row(position_ids=None, attention_mask=mask[None, None])
    found = vanilla(**dense).loss
    torch.testing.assert_close(ours(**batch).loss, found, rtol=2e-6, atol=0)
    assert scheduled == [48, 48]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"kep": "x"},
            "has no option 'kep', neither transformers' nor longctx's; did you mean kee",
        ),
        ({"strct": True}, "has no option 'strct'.*did you mean strict?"),
        ({"keep": "y"}, "AutoLongctxModelForCausalLM: keep='y': one of auto"),
        ({"parts": ["rop"]}, "AutoLongctxModelForCausalLM: parts has no part 'rop'"),
        (
            {"cross_entropy": True},
            r"cross_entropy=True is .* parts=\['rope', 'rms_norm', 'swiglu', 'cross_entropy'\] is",
        ),
        (
            {"rope": False, "keep": "x"},
            r"parts=\['rms_norm', 'swiglu', 'fused_linear_cross_entropy'\] is what",
        ),
        ({"any_model": True, "keep": "x"}, "keep is of the schedule, and any_model runs without"),
    ],
)
def test_a_wrong_option_of_from_pretrained_is_one_line(tmp_path, options, line) -> None:
    LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=line):
        longctx.AutoLongctxModelForCausalLM.from_pretrained(tmp_path, **options)


def test_from_pretrained_takes_transformers_options_and_fields_of_the_configuration(tmp_path):
    LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path)
    theirs = dict(dtype=torch.bfloat16, attn_implementation="eager", rms_norm_eps=0.5)
    load = longctx.AutoLongctxModelForCausalLM.from_pretrained
    model = load(tmp_path, **theirs, keep="x", strict=True, parts="schedule")
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager"
    assert model.model.norm.variance_epsilon == 0.5 and model.longctx.args.keep == "x"


def test_neither_or_both_inputs_are_an_error() -> None:
    _, ours = pair()
    for batch in (
        {},
        {"input_ids": torch.zeros(1, 3).long(), "inputs_embeds": torch.zeros(1, 3, 64)},
    ):
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            ours(**batch, labels=torch.zeros(1, 3).long())


def test_the_base_model_alone_makes_room_for_lm_head(monkeypatch) -> None:
    """Whose gradient and states come in the same step."""
    _, ours = pair()
    planned: list[Any] = []
    pending = ours.longctx.around.pending_bytes
    ours.longctx.surround(pending_bytes=lambda model: planned.append(model) or pending(model))
    ours.model(input_ids=packed_batch()["input_ids"])
    assert planned == [ours]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_that_is_turned_later_is_followed(scheduled, dtype) -> None:
    vanilla, ours = pair()
    ours(**packed_batch()).loss.backward()
    ours.to(dtype)
    fresh = longctx.patch(vanilla.to(dtype))
    loss, truth = ours(**packed_batch()).loss, fresh(**packed_batch()).loss
    assert torch.equal(loss, truth) and ours.longctx.dtype == dtype
    assert type(ours.longctx.attention) is type(fresh.longctx.attention)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_moved_later_is_followed(scheduled, dtype) -> None:
    """As a Trainer moves it to the GPU, patched on the CPU."""
    vanilla, ours = pair(head_dim=64)
    ours(**packed_batch()).loss.backward()
    ours.zero_grad()
    ours.to("cuda", dtype)
    fresh = longctx.patch(vanilla.to("cuda", dtype))
    batch = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in packed_batch().items()}
    assert_same(fresh, ours, lambda m: m(**batch).loss)
    assert type(ours.longctx.attention) is type(fresh.longctx.attention)
    assert ours.longctx.store.device.type == "cuda"


def test_float64_runs_hugging_faces_code(scheduled, capsys) -> None:
    vanilla, ours = (model.double() for model in pair())
    assert_same(vanilla, ours, lambda m: m(**packed_batch()).loss)
    assert scheduled == [] and "weights in float64" in capsys.readouterr().out


# --- masks -----------------------------------------------------------------------------------


def mask_of(kind: str) -> Tensor:
    mask = torch.ones(2, 48, dtype=torch.long)
    if kind == "hole":
        mask[0, 11:17] = mask[1, 40] = 0
    elif kind == "right":
        mask[1, 30:] = 0
    elif kind == "left":
        mask[1, :11] = 0
    return mask


@pytest.mark.parametrize("kind", ["ones", "hole", "right", "left"])
@pytest.mark.parametrize("jumps", [False, True], ids=["", "positions-jump"])
def test_a_mask_decides_alone(scheduled, kind, jumps) -> None:
    """Also where positions jump (PoSE), and where there is a hole."""
    vanilla, ours = pair(max_position_embeddings=4096)
    mask = mask_of(kind)
    positions = torch.arange(48).repeat(2, 1)
    if jumps:
        positions[:, 20:] += 1000
    ids = packed_batch()["input_ids"]
    labels = ids.masked_fill(mask == 0, -100)
    predicted_by_padding = (mask[:, :-1] == 0) & (mask[:, 1:] == 1)
    labels[:, 1:] = labels[:, 1:].masked_fill(predicted_by_padding, -100)
    batch = dict(input_ids=ids, labels=labels, attention_mask=mask, position_ids=positions)
    assert_same(vanilla, ours, lambda m: m(**batch, use_cache=False).loss)
    assert scheduled == 2 * [int(mask.sum())]


# --- what it returns -------------------------------------------------------------------------


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Of all logits, as often as they were computed."""
    computed: list[torch.dtype] = []
    read = logits.LazyLogits.read

    def counted(self: logits.LazyLogits) -> Tensor:
        known, found = self._logits, read(self)
        if found is not known:
            computed.append(found.dtype)
        return found

    monkeypatch.setattr(logits.LazyLogits, "read", counted)
    return computed


def test_logits_are_there_for_who_reads_them(heads) -> None:
    vanilla, ours = pair()
    truth, found = (model(**packed_batch()) for model in (vanilla, ours))
    assert found.logits.shape == truth.logits.shape and found.logits.dtype == truth.logits.dtype
    assert isinstance(found.logits, Tensor) and heads == []
    torch.testing.assert_close(found.logits.argmax(-1), truth.logits.argmax(-1))
    torch.testing.assert_close(found[1] + 0, truth[1], rtol=1e-5, atol=1e-6)
    loss, values = ours(**packed_batch(), return_dict=False)
    torch.testing.assert_close(values[:, -1], truth.logits[:, -1], rtol=1e-5, atol=1e-6)
    assert heads == 2 * [torch.float32]


def test_who_reads_the_loss_pays_for_no_logits(heads) -> None:
    _, ours = pair()
    output = ours(**packed_batch())
    output["loss"].backward()
    assert heads == [] and {"loss", "logits"} <= set(output)
    with pytest.raises(RuntimeError, match="until backward has begun"):
        output.logits.sum()


@pytest.mark.parametrize("read", [False, True], ids=["unread", "read"])
@pytest.mark.parametrize("show", [repr, str, "{}".format, "{!r}".format, pprint.pformat])
def test_an_output_can_be_displayed_at_any_time(show: Any, read: bool) -> None:
    """As by a notebook's last line."""
    _, ours = pair()
    output = ours(**packed_batch())
    if read:
        assert show(output.logits) == show(output.logits + 0).replace("Add", "UnsafeView")
    output.loss.backward()
    assert ("not read before backward began" in show(output)) != read
    assert ("(2, 48, 331)" in show(output.logits)) != read


def test_long_logits_are_displayed_without_computing_them(monkeypatch, heads) -> None:
    monkeypatch.setattr(logits, "LIMIT_BYTES", 1000)
    assert "computed when read" in repr(pair()[1](**packed_batch())) and heads == []


def test_a_loss_of_loss_and_logits() -> None:
    vanilla, ours = pair()

    def loss(model: Any) -> Tensor:
        output = model(**packed_batch())
        return output.loss + 1e-2 * output.logits.square().mean()

    assert_same(vanilla, ours, loss)


def test_all_logits_of_a_long_batch_are_an_error_that_says_what_to_ask_for(monkeypatch) -> None:
    _, ours = pair()
    monkeypatch.setattr(logits, "LIMIT_BYTES", 1000)
    output = ours(**packed_batch())
    with pytest.raises(UserError, match="pass logits_to_keep=N"):
        output.logits.sum()
    output.loss.backward()
    batch = {**packed_batch(), "labels": None}
    assert ours(**batch, logits_to_keep=2).logits.shape == (2, 2, 331)


def test_accelerates_autocast_reads_no_logits(heads) -> None:
    """Its wrapper turns every output into fp32."""
    from accelerate.utils.operations import convert_to_fp32

    _, ours = pair()
    output = convert_to_fp32(ours.bfloat16()(**packed_batch()))
    assert output["logits"].dtype == torch.float32 and heads == []
    assert output["logits"].sum().isfinite() and heads == [torch.float32]


class Passing(torch.autograd.Function):
    """As DeepSpeed's hooks and DistributedDataParallel: all outputs of a module go through it."""

    @staticmethod
    def forward(tensor: Tensor, copy: Any) -> Tensor:
        return copy(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@pytest.mark.parametrize("copy", [Tensor.detach, Tensor.clone])
def test_hooks_around_outputs_read_no_logits_and_keep_their_gradient(heads, copy) -> None:
    vanilla, ours = pair()

    def loss(model: Any) -> Tensor:
        output = model(**packed_batch())
        found = Passing.apply(output.logits, copy)
        assert found.grad_fn is None or model is vanilla
        assert heads == [] or model is vanilla
        return output.loss + 1e-2 * found.square().mean()

    assert_same(vanilla, ours, loss)
    assert heads == [torch.float32]


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
def test_distributed_data_parallel_reads_no_logits(heads, options, tmp_path) -> None:
    """The first is what Hugging Face's Trainer asks for on several GPUs."""

    def check(rank: int, processes: int) -> None:
        wrapped = DistributedDataParallel(pair()[1], **options)
        wrapped(**packed_batch()).loss.backward()
        assert heads == []

    on_ranks(2, check, tmp_path)


def test_copies_of_logits_are_what_they_are_of_tensors() -> None:
    _, ours = pair()
    output = ours.bfloat16()(**packed_batch())
    values = output.logits.float()
    values.neg_()  # in place, of another dtype: a copy
    assert torch.equal(values, -output.logits.float())
    output.logits.zero_()
    assert not output.logits.any()
    with torch.no_grad():
        kept = ours(**packed_batch()).logits.detach()
    assert not kept.requires_grad and type(kept) is Tensor


def test_ignore_index_and_a_loss_of_another_kind(capsys) -> None:
    vanilla, ours = pair()
    batch = packed_batch()
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] == -100, 7)
    assert_same(vanilla, ours, lambda m: m(**batch, ignore_index=7).loss)
    assert "custom: " not in capsys.readouterr().out
    for model in (vanilla, ours):
        model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.square().mean()
    assert_same(vanilla, ours, lambda m: m(**packed_batch()).loss)
    assert "a loss of its own" in capsys.readouterr().out


def test_a_gradient_that_others_hold_is_not_overwritten() -> None:
    """autograd hands the same tensor to both terms of a sum."""
    vanilla, ours = pair()
    batch = {k: v for k, v in packed_batch().items() if k != "labels"}
    other = torch.zeros(2, 48, 64, requires_grad=True)

    def loss(model: Any) -> Tensor:
        return (model.model(**batch).last_hidden_state + other).square().mean()

    assert_same(vanilla, ours, loss)
    first, second = (
        torch.autograd.grad(loss(vanilla), other),
        torch.autograd.grad(loss(ours), other),
    )
    torch.testing.assert_close(second, first, rtol=1e-5, atol=1e-9)


# --- the model as an object ------------------------------------------------------------------


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("how", ["saved", "copied"])
def test_a_patched_model_is_saved_and_copied_whole(scheduled, how, stepped) -> None:
    vanilla, ours = pair()
    if stepped:
        ours(**packed_batch()).loss.backward()
    if how == "saved":
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = copy.deepcopy(ours)
    assert other.longctx is other.model.longctx is not ours.longctx
    scheduled.clear()
    other.zero_grad()
    assert_same(vanilla, other, lambda m: m(**packed_batch()).loss)
    assert scheduled == [96, 96]


def test_a_deleted_model_is_gone_at_once() -> None:
    _, ours = pair()
    ours(**packed_batch()).loss.backward()
    gone = weakref.ref(ours)
    gc.disable()
    try:
        del ours
        assert gone() is None
    finally:
        gc.enable()


EXCHANGED = {
    "resized": lambda m: m.resize_token_embeddings(340, mean_resizing=False),
    "output embeddings": lambda m: m.set_output_embeddings(copy.deepcopy(PLAIN[0].lm_head)),
    "a layer": lambda m: m.model.layers.__setitem__(1, copy.deepcopy(PLAIN[0].model.layers[0])),
}
PLAIN: list[Any] = []


@pytest.mark.parametrize("what", EXCHANGED)
def test_a_part_that_is_exchanged_later_is_patched_too(scheduled, what) -> None:
    PLAIN[:] = [LlamaForCausalLM(tiny_config())]
    vanilla, ours = pair()
    for model in (vanilla, ours):
        torch.manual_seed(1)
        EXCHANGED[what](model)
    assert_same(vanilla, ours, lambda m: m(**packed_batch()).loss)
    assert scheduled == [96, 96]


def test_a_model_may_be_cast_after_it_was_patched(scheduled) -> None:
    """Or moved: from_pretrained, patch, and Trainer brings it to the GPU."""
    vanilla, ours = pair()
    before = ours.longctx.attention
    losses = [model.half()(**packed_batch()).loss for model in (vanilla, ours)]
    torch.testing.assert_close(losses[1].float(), losses[0].float(), rtol=1e-3, atol=0)
    assert type(ours.longctx.attention) is not type(before) and ours.longctx.dtype == torch.float16
    assert scheduled == [96, 96]


def test_strict_refuses_what_hugging_faces_layers_would_run() -> None:
    model = longctx.patch(LlamaForCausalLM(tiny_config()).train(), strict=True)
    model(**packed_batch()).loss.backward()
    model.model.layers[0].mlp.register_forward_hook(lambda *args: None)
    with pytest.raises(UserError, match=r"hooks on model.layers.0.mlp \(strict=True\)"):
        model(**packed_batch())
    model.generate(packed_batch()["input_ids"], max_new_tokens=2, do_sample=False)


def test_a_layers_output_that_is_used_twice(scheduled) -> None:
    """By hooks: Hugging Face's layers run."""
    vanilla, ours = pair()
    for model in (vanilla, ours):
        kept: list[Tensor] = []
        first, second = model.model.layers
        first.register_forward_hook(lambda m, args, out, kept=kept: kept.append(out))
        second.register_forward_hook(lambda m, args, out, kept=kept: out + kept.pop())
    assert_same(vanilla, ours, lambda m: m(**packed_batch()).loss)
    assert scheduled == []


def test_unpatched_it_is_hugging_faces_again(scheduled) -> None:
    vanilla, ours = pair()
    assert longctx.unpatch(ours) is ours
    assert not [m for m in ours.modules() if {"forward", "longctx"} & vars(m).keys()]
    assert torch.equal(ours(**packed_batch()).loss, vanilla(**packed_batch()).loss)
    assert scheduled == []
    longctx.patch(ours)(**packed_batch()).loss.backward()
    assert scheduled == [96, 96]


# --- bad input -------------------------------------------------------------------------------


def test_the_door_says_what_it_did(capsys, monkeypatch) -> None:
    """In one line of the first process."""
    longctx.patch(LlamaForCausalLM(tiny_config()), keep="o")
    said = capsys.readouterr().out
    assert said == (
        "longctx patched: 2 scheduled decoder layers, flash attention, RMSNorm, lm_head + "
        "cross-entropy; keep=o, offload_activations=auto\n"
    )
    monkeypatch.setenv("RANK", "1")
    longctx.patch(LlamaForCausalLM(tiny_config()))
    assert capsys.readouterr().out == ""


def test_train_pys_own_door_says_nothing_by_itself(capsys) -> None:
    """train.py prints what it returns."""
    said = patch_as(LlamaForCausalLM(tiny_config()), PatchOptions(), torch.device("cpu"))
    assert said.startswith("patched: 2 scheduled") and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        (lambda: LlamaForCausalLM(tiny_config()), {"kep": "o"}, "did you mean keep?"),
        (lambda: LlamaForCausalLM(tiny_config()), {"keep": "everything"}, "keep"),
        (lambda: longctx.patch(LlamaForCausalLM(tiny_config())), {}, "patched already"),
        (lambda: torch.nn.Linear(2, 2), {}, "Linear"),
        (lambda: "llama", {}, "got str"),
        (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2)), {}, "GPT2LMHeadModel"),
        (lambda: on_meta(), {}, "no weights yet"),
        (lambda: quantised(), {}, "is quantised"),
    ],
)
def test_bad_input_is_one_line(model, options, says) -> None:
    with pytest.raises(UserError, match=says.replace("?", r"\?")) as error:
        longctx.patch(model(), **options)
    assert "\n" not in str(error.value)


def on_meta() -> Any:
    with torch.device("meta"):
        return LlamaForCausalLM(tiny_config())


def quantised() -> Any:
    model = LlamaForCausalLM(tiny_config())
    model.is_quantized, model.quantization_method = True, "bitsandbytes"
    return model


def test_every_option_is_one_of_train_py() -> None:

    assert set(OPTIONS) <= set(ModelArguments.__dataclass_fields__)
