"""A class whose instances are patched as they are built: by whom they are built, who calls them
first, and what is left of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_model import packed_batch, tiny_config
from small_vision import image_batch, vision_config
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlamaModel,
    LlavaModel,
    Qwen3ForCausalLM,
)

import longctx
from longctx.errors import UserError

pytestmark = pytest.mark.usefixtures("reference_kernels")
LINE = "longctx patched: 2 scheduled decoder layers, flash attention, RMSNorm, lm_head + "


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(**changes)).train()


def loss_of(model: Any) -> float:
    loss = model(**packed_batch()).loss
    loss.backward()
    return float(loss)


@pytest.fixture
def folder(tmp_path) -> str:
    llama().save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("built_by", ["the class", "from_config", "from_pretrained", "bf16"])
def test_whoever_builds_the_model(built_by, folder, scheduled, capsys) -> None:
    make = {
        "the class": llama,
        "from_config": lambda: AutoModelForCausalLM.from_config(tiny_config()),
        "from_pretrained": lambda: AutoModelForCausalLM.from_pretrained(folder),
        "bf16": lambda: AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16"),
    }[built_by]
    torch.manual_seed(0)
    truth = loss_of(make().train())
    assert scheduled == []
    capsys.readouterr()
    torch.manual_seed(0)
    with longctx.patch_class("llama"):
        ours = make().train()
    assert capsys.readouterr().out == ""
    assert loss_of(ours) == pytest.approx(truth, rel=1e-2 if built_by == "bf16" else 2e-6)
    assert scheduled == [96, 96]
    loss_of(ours)
    assert capsys.readouterr().out.count(LINE) == 1


def test_options_and_strict() -> None:
    with longctx.patch_class(LlamaForCausalLM, keep="x", share_prefixes=True, strict=True):
        ours = llama()
    assert ours.longctx.args.keep == "x" and ours.longctx.args.share_prefixes
    with pytest.raises(UserError, match="strict=True"):
        ours(**packed_batch(), output_attentions=True)


def test_parts(scheduled, capsys) -> None:
    truth = loss_of(llama())
    with longctx.patch_class("llama", parts=["rms_norm", "fused_linear_cross_entropy"]):
        ours = llama()
    assert loss_of(ours) == pytest.approx(truth, rel=2e-6) and scheduled == []
    assert "rms_norm, fused_linear_cross_entropy, in Hugging Face's" in capsys.readouterr().out


def test_the_base_model_alone_and_a_classifiers(scheduled) -> None:
    with longctx.patch_class("llama"):
        base = LlamaModel(tiny_config()).train()
        classifier = AutoModelForSequenceClassification.from_config(tiny_config(pad_token_id=0))
    base(packed_batch()["input_ids"]).last_hidden_state.sum().backward()
    assert scheduled == [96, 96]
    classifier.train()(packed_batch()["input_ids"], labels=torch.tensor([0, 1])).loss.backward()
    assert len(scheduled) == 4


def test_a_vision_language_model_without_its_head(scheduled) -> None:
    with longctx.patch_class(LlavaModel):
        alone = LlavaModel(vision_config("llava"))
    assert hasattr(alone.language_model, "longctx") and "forward" in vars(alone)
    assert not hasattr(LlavaModel(vision_config("llava")).language_model, "longctx")
    inputs = image_batch("llava")
    del inputs["labels"]
    alone.train()(**inputs).last_hidden_state.sum().backward()
    assert scheduled == [48] * len(alone.language_model.layers)


def test_generation_and_evaluation_before_training(scheduled, capsys) -> None:
    vanilla = llama()
    with longctx.patch_class("llama"):
        ours = llama()
    ids = packed_batch()["input_ids"][:1, :9]
    made = [m.eval().generate(ids, max_new_tokens=4, do_sample=False) for m in (vanilla, ours)]
    assert torch.equal(*made) and scheduled == []
    with torch.no_grad():
        losses = [m(**packed_batch()).loss for m in (vanilla, ours)]
    torch.testing.assert_close(*losses, rtol=2e-6, atol=0)
    assert capsys.readouterr().out.count(LINE) == 1
    assert loss_of(ours.train()) == pytest.approx(losses[0].item(), rel=2e-6)
    assert len(scheduled) == 4


def test_what_frameworks_do_between(scheduled) -> None:
    """Larger embeddings, checkpoints, a cast, a copy."""

    def prepared(model: Any) -> Any:
        torch.manual_seed(1)
        model.resize_token_embeddings(340, mean_resizing=False)
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        model.config.use_cache = False
        return copy.deepcopy(model.double().float()).train()

    with longctx.patch_class("llama"):
        ours = llama()
    truth = loss_of(prepared(llama()))
    assert scheduled == []
    assert loss_of(prepared(ours)) == pytest.approx(truth, rel=2e-6)
    assert scheduled == [96, 96]


def test_a_subclass() -> None:
    class Mine(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.lm_head = torch.nn.Linear(64, 331, bias=False)  # one of its own

    torch.manual_seed(0)
    truth = loss_of(Mine(tiny_config()))
    with longctx.patch_class("llama"):
        torch.manual_seed(0)
        ours = Mine(tiny_config())
    assert loss_of(ours) == pytest.approx(truth, rel=2e-6)
    assert "forward" in vars(ours.lm_head)


# --- undone ----------------------------------------------------------------------------------


def test_undone_by_a_call() -> None:
    before = LlamaForCausalLM.__init__, LlamaModel.__init__
    undo = longctx.patch_class("llama")
    with pytest.raises(UserError, match="LlamaForCausalLM is patched already: undo that first"):
        longctx.patch_class(LlamaForCausalLM)
    ours = llama()
    undo()
    undo()
    assert (LlamaForCausalLM.__init__, LlamaModel.__init__) == before
    assert not hasattr(llama(), "longctx") and hasattr(ours, "longctx")
    assert not hasattr(longctx.unpatch(ours), "longctx")


def test_somebody_elses_init_stays(monkeypatch) -> None:
    undo = longctx.patch_class("llama")
    ours = LlamaForCausalLM.__init__
    calls: list[int] = []

    def theirs(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(1)
        ours(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", theirs)
    undo()
    assert not hasattr(llama(), "longctx") and calls == [1]
    monkeypatch.undo()
    LlamaForCausalLM.__init__ = ours.__wrapped__


def test_an_error_while_building_leaves_nothing() -> None:
    with longctx.patch_class("llama"):
        with pytest.raises(TypeError):
            LlamaForCausalLM(tiny_config(), unknown=1)
        assert hasattr(llama(), "longctx")
        assert not hasattr(Qwen3ForCausalLM(tiny_config("qwen3")), "longctx")


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "options", "line"),
    [
        ("lama", {}, "no causal language model of type 'lama'; did you mean llama?"),
        ("gpt2", {}, "longctx has no family for GPT2LMHeadModel"),
        (GPT2LMHeadModel, {}, "longctx has no family for GPT2LMHeadModel"),
        ("mllama", {}, "MllamaForCausalLM: its layers of cross-attention"),
        (torch.nn.Linear, {}, "takes a model type, as 'llama', or a class of transformers"),
        ("llama", {"kep": "x"}, "patch_class has no option 'kep'; did you mean keep?"),
        ("llama", {"keep": "y"}, "patch_class: keep='y': one of auto, x"),
        ("llama", {"parts": ["rop"]}, "patch_class: parts has no part 'rop'; did you mean rope?"),
        ("llama", {"parts": ["geglu"]}, "geglu is not for models of 'llama'"),
    ],
)
def test_refused_at_once(which, options, line) -> None:
    with pytest.raises(UserError, match=line):
        longctx.patch_class(which, **options)
    assert not hasattr(llama(), "longctx")
