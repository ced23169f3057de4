"""A runtime's three frozen parts, and who may exchange them."""

from __future__ import annotations

import ast
import copy
import dataclasses

import pytest
import torch
from paths import ROOT
from small_model import tiny_config
from transformers import AutoModelForCausalLM

import longctx
from longctx.runtime.runtime import Adopted, Runtime
from longctx.runtime.surroundings import Surroundings
from longctx.settings import PatchOptions


def empty() -> Runtime:
    return Runtime.make(PatchOptions(), None, torch.device("meta"), torch.float32)


def test_surroundings_are_told_by_name() -> None:
    runtime = empty()
    before = runtime.around
    runtime.surround(passes=3, moves_weights=True)
    assert runtime.around == Surroundings(passes=3, moves_weights=True)
    assert before == Surroundings() and runtime.ranks == 1
    with pytest.raises(TypeError, match="pases"):
        runtime.surround(pases=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        runtime.around.passes = 2


def test_a_model_that_moves_to_another_dtype_decides_anew() -> None:
    model = longctx.patch(AutoModelForCausalLM.from_config(tiny_config())).train()
    runtime, ids = model.longctx, torch.arange(8).view(1, 8)
    model(input_ids=ids, labels=ids)
    first, adopted = runtime.compute, runtime.adopted
    assert first.dtype == first.stream_dtype == torch.float32 and adopted.tokens == 8
    assert adopted.cut is not None
    model(input_ids=ids[:, :5], labels=ids[:, :5])
    assert runtime.compute is first and runtime.adopted is adopted
    model.bfloat16()
    model(input_ids=ids[:, :5], labels=ids[:, :5])
    assert runtime.dtype == torch.bfloat16 and runtime.adopted.tokens == 5
    assert runtime.store is first.store  # on the device where it was
    runtime.forget()
    assert runtime.adopted == Adopted()


def test_a_copy_keeps_what_a_trainer_asked_for_and_no_engines_word() -> None:
    runtime = empty()
    runtime.surround(label_smoothing=0.1, passes=4, strict=True, moves_weights=True, link_bytes=1e9)
    found = copy.deepcopy(runtime)
    assert found.around == Surroundings(label_smoothing=0.1, passes=4, strict=True)
    assert found.adopted == Adopted() and found.args == runtime.args


def test_the_last_that_waits_for_a_pass_is_called_first() -> None:
    runtime, called = empty(), []
    trainer_is_there = iter([False, True])
    runtime.at_next_pass(lambda: called.append("beside") or next(trainer_is_there))
    runtime.at_next_pass(lambda: called.append("built") or True)
    for _ in range(3):
        runtime.begin_pass()
    assert called == ["built", "beside", "beside"]


def test_what_a_call_and_a_step_tell_ends_with_them() -> None:
    runtime, caller = empty(), object()
    with pytest.raises(ValueError), runtime.handing(caller, "images"), runtime.settling(True):
        assert runtime.caller is caller and runtime.images == "images" and runtime.settled
        raise ValueError
    assert runtime.caller is runtime.images is None and not runtime.settled


def assigned(tree: ast.Module) -> list[str]:
    """Returns the attributes of what is called a runtime that a file assigns."""
    targets: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
            targets.append(node.target)
    targets = [x for t in targets for x in (t.elts if isinstance(t, ast.Tuple) else [t])]
    found = [ast.unparse(x) for x in targets if isinstance(x, ast.Attribute)]
    return [x for x in found if x.split(".")[-2] in ("runtime", "longctx")]


@pytest.mark.parametrize("line", ["a.runtime.x = 1", "m.longctx.x: int = 1", "b, runtime.x = 1, 2"])
def test_an_assignment_is_found(line: str) -> None:
    assert len(assigned(ast.parse(line))) == 1
    assert assigned(ast.parse("a.runtime = 1; model.x = runtime.x")) == []


def test_no_other_file_assigns_an_attribute_of_a_runtime() -> None:
    """The room of any model has a runtime of its own."""
    folders = ("longctx", "profiling", "scripts")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    others = [path for path in files if path.parent.name not in ("runtime", "any_model")]
    texts = {path: path.read_text() for path in others}
    texts = {path: x for path, x in texts.items() if "runtime." in x or "longctx." in x}
    found = {path: assigned(ast.parse(x)) for path, x in texts.items()}
    assert len(others) > 300 and {path: x for path, x in found.items() if x} == {}
