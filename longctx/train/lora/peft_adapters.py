"""Adapters on a model that `longctx train` loads: r (I + O) numbers in fp32 for each map (O, I), of
DoRA O more. Experts have one each, of the same rank; routers have none.

check_peft       a run needs PEFT; a plan counts shapes without it (shapes.py)
check_lora       what the options name is in the model, before its weights are read
adapter_bytes    what a checkpoint of it holds
with_lora        PEFT's LoraConfig on the model; the rest is frozen
add_adapters     the same in a run, checked
save_config      what an adapter does not hold
Reached          after the first step: training got to every adapter
"""

from __future__ import annotations

import copy
import difflib
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import GenerationConfig, PretrainedConfig, TrainerCallback

from longctx.errors import UserError, counted
from longctx.families.adapters import inside_peft, within
from longctx.families.blocks import decoder_layers
from longctx.families.classes import is_classifier, without_storage
from longctx.families.families import base_of, layers_of
from longctx.families.family import part_of
from longctx.families.matrices import linears, stacks
from longctx.families.stand_ins import shaped_experts
from longctx.families.strangers import why_not_scheduled
from longctx.families.vision import towers
from longctx.layer.dense_experts import STACKS
from longctx.layer.packed_weights import packed_names
from longctx.packages import pip_install
from longctx.system import expanded, installed
from longctx.train.options.config import ModelArguments

ALL_LINEAR = "all-linear"
EXPERTS = "experts"
"""The word of `--lora_targets` for the weights of all experts."""
_ENDS = ("embed_tokens", "lm_head")
"""The modules of a language model that `--lora_modules_to_save` may name."""
_SCORE = "score"
"""The head of a model of rewards, which PEFT always trains as a whole together with adapters."""
_OUT_PROJ = "out_proj"
_READS_OUT_PROJ = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
"""The types of models in which PEFT refuses an adapter on it, since mamba-ssm's kernels may read
the weight without the module (its `_check_lora_target_modules_mamba`)."""


def check_peft(args: ModelArguments) -> None:
    """Raises UserError where adapters are asked for and PEFT is not installed."""
    if args.lora_r is not None and not installed("peft"):
        raise UserError(f"--lora_r needs PEFT: {pip_install('peft')}")


def check_lora(args: ModelArguments, config: PretrainedConfig) -> None:
    """Raises UserError for an option that names nothing in the model, or what cannot train."""
    if args.lora_r is None:
        return
    saved, ends = args.lora_modules_to_save or [], _ends(config)
    for name in saved:
        if name == _SCORE in ends:
            raise UserError(f"--lora_modules_to_save {_SCORE}: it always is: leave it out")
        if name not in ends:
            raise UserError(f"--lora_modules_to_save {name}: {_nearest(name, ends)}")
    if saved and getattr(config, "tie_word_embeddings", False):
        raise UserError(
            "--lora_modules_to_save: this model's lm_head is its embedding, and copies of them "
            "would be trained apart: leave it out, or train the whole model"
        )
    skeleton = without_storage(config)
    if skeleton is None:
        return
    if adapted_stacks(skeleton, args):
        for name, asked in (("lora_dropout", args.lora_dropout), ("use_dora", args.use_dora)):
            if asked:
                raise UserError(
                    f"--{name}: adapters of experts have none: leave it out, or name maps without "
                    "them (--lora_targets q_proj k_proj v_proj o_proj)"
                )
    known = _adaptable(skeleton, args.train_vision)
    if args.lora_targets and EXPERTS in args.lora_targets and not expert_stacks(skeleton):
        raise UserError(f"--lora_targets {EXPERTS}: the model has none that longctx knows")
    for target in args.lora_targets or ():
        _check_target(target, known, args, skeleton)


def _ends(config: PretrainedConfig) -> tuple[str, ...]:
    """Returns the parts around the decoder layers that are trained as a whole or not at all."""
    return ("embed_tokens", _SCORE) if is_classifier(config) else _ENDS


def _refuses_out_proj(config: PretrainedConfig) -> bool:
    return config.model_type in _READS_OUT_PROJ


def _check_target(
    target: str, known: dict[str, nn.Linear], args: ModelArguments, model: Any
) -> None:
    if target == ALL_LINEAR:
        if len(args.lora_targets or ()) > 1:
            raise UserError(f"--lora_targets {ALL_LINEAR} names all there are: leave out the rest")
        return
    if target == _SCORE in known:
        raise UserError(
            f"--lora_targets {_SCORE}: the head of rewards is trained as a whole beside the "
            "adapters: leave it out"
        )
    if target in _ENDS:
        raise UserError(
            f"--lora_targets {target}: it is trained as a whole, with --lora_modules_to_save "
            f"{target}; an adapter on it would need all logits at once"
        )
    if target == _OUT_PROJ and _refuses_out_proj(model.config):
        raise UserError(
            f"--lora_targets {target}: PEFT refuses it in models of type "
            f"{model.config.model_type!r}: leave it out"
        )
    if target == EXPERTS or any(_names(target, path) for path in known):
        return
    mixture = has_experts(model)
    if mixture and any(_names(target, path) for path in _inside_layers(model)):
        raise UserError(
            f"--lora_targets {target}: routers and other MLPs than experts stay as they are in "
            f"adapted mixtures: leave it out, or name {EXPERTS}"
        )
    endings = {path.rpartition(".")[2] for path in known if path not in (*_ENDS, _SCORE)}
    endings |= {EXPERTS} if mixture else set()
    raise UserError(f"--lora_targets {target}: {_nearest(target, endings)}")


def _inside_layers(model: Any) -> Iterator[str]:
    """Yields the paths of the modules of all decoder layers, each in its layer."""
    layers: Any = decoder_layers(model)
    return (path for layer in layers for path, _ in layer.named_modules())


def _names(target: str, path: str) -> bool:
    """Matches a module's path as PEFT matches a list of targets."""
    return path == target or path.endswith(f".{target}")


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=2, cutoff=0.3) or names[:2]
    return f"the model has no such part; did you mean {' or '.join(close)}? All: {', '.join(names)}"


def adapter_bytes(args: ModelArguments, config: PretrainedConfig) -> int:
    """Counts a saved adapter's bytes without making it; 0 for a class that is not transformers'."""
    skeleton = without_storage(config)
    if skeleton is None or args.lora_r is None:
        return 0
    adapted = [*adapted_linears(skeleton, args).values()]
    total = sum(args.lora_r * (linear.in_features + linear.out_features) for linear in adapted)
    total += args.use_dora * sum(linear.out_features for linear in adapted)
    for stack in adapted_stacks(skeleton, args).values():
        total += args.lora_r * len(stack) * (stack.shape[1] + stack.shape[2])
    saved = len(args.lora_modules_to_save or ())
    text = config.get_text_config()
    total += saved * text.vocab_size * text.hidden_size
    return 4 * (total + is_classifier(config) * text.hidden_size)


def _adaptable(model: nn.Module, vision: bool) -> dict[str, nn.Linear]:
    """Returns the linear maps that may get adapters, by path: those of the vision tower with
    `vision` alone, none of the MLPs among layers of experts or beside them, whose names PEFT takes
    for those of experts, and none that PEFT refuses."""
    of_towers = {inner for _, tower in towers(model) for inner in tower.modules()}
    left_out = [".mlp."] * has_experts(model)
    left_out += [f".{_OUT_PROJ}"] * _refuses_out_proj(inside_peft(model).config)
    return {
        path: linear
        for path, linear in linears(model).items()
        if (vision if linear in of_towers else not any(part in path for part in left_out))
    }


def adapted_linears(model: nn.Module, args: ModelArguments) -> dict[str, nn.Linear]:
    """Returns the linear maps that get adapters, by path."""
    targets = args.lora_targets or [ALL_LINEAR]
    return {
        path: linear
        for path, linear in _adaptable(model, args.train_vision).items()
        if path not in (*_ENDS, _SCORE)
        and any(target == ALL_LINEAR or _names(target, path) for target in targets)
    }


def expert_stacks(model: Any) -> dict[str, nn.Parameter]:
    """Returns the parameters that hold experts' weights (E, O, K) in a model of a known family, by
    their paths in its base model."""
    base, found = base_of(inside_peft(model)), {}
    for i, (layer, spec) in enumerate(layers_of(base) if base is not None else []):
        for path in (spec.held[name] for name in STACKS if name in spec.held):
            owner, _, own = path.rpartition(".")
            found[f"layers.{i}.{path}"] = getattr(within(part_of(layer, owner)), own)
    return found


def adapted_stacks(model: Any, args: ModelArguments) -> dict[str, nn.Parameter]:
    """Returns the stacked expert parameters that get adapters."""
    targets = args.lora_targets or [ALL_LINEAR]
    return expert_stacks(model) if {ALL_LINEAR, EXPERTS} & {*targets} else {}


def with_lora(model: Any, args: ModelArguments) -> Any:
    """Returns the PeftModel around `model`, of which adapters alone are trained."""
    import peft

    assert args.lora_r is not None
    targets = args.lora_targets or [ALL_LINEAR]
    every = targets == [ALL_LINEAR]
    stacked = {path.split(".", 2)[2] for path in adapted_stacks(model, args)}
    if stacked or (every and has_experts(model)):
        # PEFT's own word would adapt routers, too, and experts at twice the rank.
        every, paths = False, adapted_linears(model, args)
        targets = sorted({path.rpartition(".")[2] for path in paths})
    config = peft.LoraConfig(
        task_type="SEQ_CLS" if is_classifier(model.config) else "CAUSAL_LM",
        r=args.lora_r,
        lora_alpha=args.lora_alpha or 2 * args.lora_r,
        lora_dropout=args.lora_dropout,
        target_modules=ALL_LINEAR if every else targets,
        target_parameters=sorted(stacked) or None,
        modules_to_save=args.lora_modules_to_save,
        use_dora=args.use_dora,
        exclude_modules=_excluded(model, args.train_vision),
    )
    with warnings.catch_warnings(), shaped_experts(model):
        # PEFT asks transformers for the name that it has given up.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        adapted = peft.get_peft_model(model, config)
    config.base_model_name_or_path = _base_name(args)  # where to find it from any folder
    _refuse_merges_(adapted)
    return adapted


def _refuse_merges_(adapted: nn.Module) -> None:
    """Has PEFT's merge in place refused over packed weights, but for linear layers of bitsandbytes,
    which PEFT knows: it would add the adapter to bytes."""
    wrapper: Any
    for wrapper in adapted.modules():
        if hasattr(wrapper, "merge") and hasattr(wrapper, "get_base_layer"):
            base = wrapper.get_base_layer()
            packed = packed_names(base.parameters(recurse=False))
            if packed and type(base).__name__ != "Linear4bit":
                vars(wrapper)["merge"] = partial(_refuse_merge, packed[0])


def _refuse_merge(packed: str, *args: Any, **kwargs: Any) -> None:
    raise UserError(
        f"adapters over {packed} are not merged in place, which would round the weights once more "
        "and lose most of what was learnt: save them, then run longctx merge"
    )


def has_experts(model: Any) -> bool:
    """Whether layers hold the weights of several experts in one parameter."""
    layers: Any = decoder_layers(model)
    return bool(stacks(layers))


def _excluded(model: Any, vision: bool) -> str | None:
    """Returns a pattern of the paths of modules that get no adapter: of those that see images,
    without `vision`, and of those that PEFT refuses; None if there are none."""
    paths = [] if vision else [rf"{re.escape(path)}\..*" for path, _ in towers(model)]
    paths += [rf".*\.{_OUT_PROJ}"] * _refuses_out_proj(model.config)
    return "|".join(paths) or None


def add_adapters(model: Any, args: ModelArguments) -> tuple[Any, str]:
    """Returns the model of a run with its adapters, and a short line on them. Raises UserError
    where the schedule would leave the model to Hugging Face's layers."""
    adapted = with_lora(model, args)
    if args.class_type == "custom":
        base = base_of(inside_peft(adapted))
        if base is not None and (reason := why_not_scheduled(base)):
            raise UserError(f"--lora_r: the schedule would not run, for {reason}")
    elif args.class_type != "any":  # whose checkpoints are not reentrant
        # Reentrant checkpoints of frozen inputs have no gradient at all. Autograd would hold the
        # embedding's output, which is a leaf then, until backward ends.
        adapted.enable_input_require_grads()
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    count = sum("lora_A" in name for name, _ in adapted.named_parameters())
    kind = "DoRA" if args.use_dora else "LoRA"
    over = "".join(f" over {name}" for name in packed_names(adapted.parameters()))
    said = f"{kind} of rank {args.lora_r} on {count} maps{over}, "
    said += f"{counted(trained)} parameters trained"
    said += " with the head of rewards" * is_classifier(inside_peft(adapted).config)
    if _refuses_out_proj(inside_peft(adapted).config):
        said += f"; {_OUT_PROJ} of mixers has none, which PEFT refuses"
    if has_experts(inside_peft(adapted)):
        alone = adapted_stacks(adapted, args)
        said += "; routers are frozen" if alone else "; experts and their routers are frozen"
    return adapted, said


def save_config(model: Any, folder: Path) -> None:
    """Saves the configuration that an adapter was trained with next to it: RoPE and positions may
    be other ones than those of its model's files. Nothing for a whole model, which is saved with
    its own."""
    base = inside_peft(model)
    if base is model:
        return
    config = copy.deepcopy(base.config)
    vars(config).pop("quantization_config", None)
    config.save_pretrained(folder)
    if getattr(base, "generation_config", None) is not None:
        GenerationConfig.from_model_config(config).save_pretrained(folder)  # the trained ends


def _base_name(args: ModelArguments) -> str | None:
    name = args.model_name_or_path
    folder = None if name is None else expanded(name)
    return name if folder is None or not folder.exists() else os.path.abspath(folder)


class Reached(TrainerCallback):
    """An adapter that gets no gradient is an error, not a run that trains less than it says."""

    def __init__(self, model: nn.Module) -> None:
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.missing = dict.fromkeys(trained)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._reached(name))
            for name, parameter in trained.items()
        ]

    def _reached(self, name: str) -> Any:
        def reached(parameter: Any) -> None:
            self.missing.pop(name, None)

        return reached

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Called when the gradients of the first step are there, or are consumed already, and not
        before its update, which may then begin while the host waits for their norm. FSDP2 has other
        parameters by now, which have a gradient of their own but run no hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.missing:
            now = dict(kwargs["model"].named_parameters())
            self.missing = {n: None for n in self.missing if now[n].grad is None}
        if self.missing:
            raise UserError(
                f"training does not reach {len(self.missing)} of the weights it should train: "
                f"{', '.join(_first(self.missing))}"
            )


def _first(names: Iterable[str]) -> Iterator[str]:
    for i, name in enumerate(names):
        if i == 3:
            yield "..."
            return
        yield name
