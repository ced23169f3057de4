"""Tests on two short rows, before any step, whether our attention and our loss equal the model's.

A specimen is tried (any_model/specimen.py): the model's class and configuration, a few layers,
random weights, fp32. So the answer depends neither on the model's size nor on whether its weights
are loaded. A model that computes scores in another way, or adds a term to its loss, shows a
difference of percents; rounding in fp32 leaves 1e-6 per layer.

The specimen is on the GPU, or on the CPU with less width (any_model/shrunk_config.py), where both
tests take 0.6 s of one core for Llama-3.1-8B's sizes, 2.3 s for DeepSeek-V3's, and 4.9 s for those
of Gemma 4 E4B, which runs with all layers only (measured).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from longctx.any_model.attention import counted_calls
from longctx.any_model.loss import any_forward
from longctx.any_model.packed import with_short_windows
from longctx.any_model.runtime import NAME, AnyRuntime, LossFactors
from longctx.any_model.shrunk_config import narrowed
from longctx.any_model.specimen import Found, Specimen, of_specimen, outline
from longctx.errors import UserError, one_line
from longctx.settings import PatchOptions

Answer = TypeVar("Answer")
_OF_A_FILE = frozenset(
    "architectures dtype torch_dtype use_cache transformers_version _name_or_path "
    "_attn_implementation".split()
)
"""Settings of a configuration that change no answer. Making a model writes some of them."""


def remembered(ask: Callable[..., Answer]) -> Callable[..., Answer]:
    """Returns a function of a configuration, a class and further arguments that remembers its
    answers: a plan, the packing of rows and the patch of a model ask for the same ones. Errors are
    not remembered."""
    answers: dict[Any, Answer] = {}

    @wraps(ask)
    def answer(config: Any, kind: Any, *rest: Any) -> Answer:
        said = json.dumps(_without_file(config.to_dict()), sort_keys=True, default=str)
        key = said, kind, *(x.type if isinstance(x, torch.device) else x for x in rest)
        if key not in answers:
            answers[key] = ask(config, kind, *rest)
        return answers[key]

    return answer


def _without_file(said: Any) -> Any:
    if not isinstance(said, dict):
        return said
    return {str(name): _without_file(x) for name, x in said.items() if name not in _OF_A_FILE}


ROWS, TOKENS = 2, 24
"""The rows of the batch on which attention is tried, and the tokens of each: more than the windows
of `with_short_windows` have."""
LABELLED = 16
"""Tokens in each of the two rows on which losses are compared: 32 in all."""
CLOSE = 2e-5
"""The largest relative difference of two losses that count as equal."""
SAME = 1e-3
"""The largest relative difference of hidden states from two kinds of attention that count as equal.
Nine tokens of ten must keep it, since a router may decide near ties differently. The rounding of 30
layers of Gemma 4 with random weights grows to 2.4e-4."""


@remembered
def why_not_our_attention(
    config: Any, kind: Any, own: str | None, device: torch.device
) -> str | None:
    """Returns a short reason why the layers of a model of the class `kind` cannot have our
    attention; None if they compute the same with it as with `own`, one of transformers' names."""
    if not kind._can_set_attn_implementation():
        return _ITSELF
    if dropout := _attention_dropout(config.get_text_config()):
        return f"it has {dropout} in attention, which ours has not"
    tried = deepcopy(config)
    with_short_windows(tried)
    try:
        return _of_specimen(tried, kind, own, device, _why_other_states)
    except UserError as error:
        return one_line(error, 160)
    except Exception as error:  # the model's own code may raise anything
        return _untried(error)


@remembered
def find_loss(config: Any, kind: Any, device: torch.device) -> tuple[LossFactors | None, str]:
    """Returns the factors with which our loss equals that of models of a class, or None and a short
    reason why there are none."""
    try:
        return _of_specimen(config, kind, None, device, _compared)
    except UserError:
        raise
    except Exception as error:  # the model's own code may raise anything
        return None, _untried(error)


def _of_specimen(
    config: Any,
    kind: Any,
    attention: str | None,
    device: torch.device,
    look: Callable[[Specimen], Found],
) -> Found:
    """Returns what `look` returns for a specimen in fp32, on a GPU if it has room. A CPU gets one
    with less width, or one as wide as the model if the class cannot be made, or run, with less."""
    make = partial(outline, kind=kind, attention=attention, dtype=torch.float32)
    cpu = torch.device("cpu")
    with _exact_fp32():
        if device.type == "cuda":
            with suppress(torch.OutOfMemoryError):
                return of_specimen(partial(make, config), device, look)
        try:
            return of_specimen(partial(make, narrowed(config)), cpu, look)
        except UserError:
            raise
        except Exception:
            return of_specimen(partial(make, config), cpu, look)


@contextmanager
def _exact_fp32() -> Iterator[None]:
    """Returns a context without TF32, which trainers switch on: its 10 bits leave errors of 1e-3 in
    a matmul. torch has an older and a newer setting for it, and raises an error if one is written
    and the other is read, so both are restored."""
    cudnn: Any = torch.backends.cudnn
    places = torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn
    matmul, before = torch.get_float32_matmul_precision(), [x.fp32_precision for x in places]
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        cudnn.allow_tf32 = before[1] == "tf32"
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


def _why_other_states(specimen: Specimen) -> str | None:
    """Returns a short reason that shows that a model computes other states with our attention; None
    if it does not."""
    theirs = _states(specimen)
    with counted_calls() as (name, calls):
        try:
            specimen.model.set_attn_implementation(name)
            ours = _states(specimen)
        except torch.OutOfMemoryError:
            raise
        except UserError as error:
            return one_line(error, 160)
        except Exception as error:  # a model's own code may do anything with a `Seen` as mask
            return _untried(error)
    if not any(calls):
        return _ITSELF
    if not theirs.isfinite().all():
        return "it cannot be tried: its states overflow with random weights"
    errors = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-30)
    if (most := float(errors.quantile(0.9))) <= SAME:
        return None
    return f"hidden states differ by {100 * most:.3g}% from its own attention's"


def _untried(error: Exception) -> str:
    return f"it cannot be tried: {type(error).__name__}: {one_line(error, 120)}"


@torch.no_grad()
def _compared(specimen: Specimen) -> tuple[LossFactors | None, str]:
    model = specimen.model.eval()
    if reason := why_no_head(model.get_output_embeddings()):
        return None, reason
    given = _labelled(specimen)
    own = float(model(**given).loss)
    for factors in _candidates(model.config.get_text_config()):
        if abs(_our_loss(model, factors, given) - own) <= CLOSE * abs(own):
            return factors, ""
    return None, "our loss differs from its own"


def why_no_head(head: Any) -> str | None:
    """Returns why our loss cannot be computed in a model's lm_head; None if it can."""
    if head is None:
        return "it has no lm_head"
    if type(head) is not nn.Linear and not type(head).__name__.startswith("FSDP"):
        return f"its lm_head is a {type(head).__name__}"
    return None


_ITSELF = "its layers compute attention themselves, or have none"


def _our_loss(model: Any, factors: LossFactors, given: dict[str, Any]) -> float:
    store: Any = None  # nothing is kept in evaluation
    vars(model)[NAME] = AnyRuntime(args=PatchOptions(class_type="any"), store=store, loss=factors)
    return float(any_forward(model, **given).loss)


def _candidates(config: Any) -> Iterator[LossFactors]:
    """Yields the loss without factors, then with those that a configuration names."""
    scalings = [1.0]
    if scale := getattr(config, "logit_scale", None):  # Cohere's: a factor
        scalings.append(1 / scale)
    if scaling := getattr(config, "logits_scaling", None):  # Granite's: a divisor
        scalings.append(scaling)
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    caps = [None, *filter(None, (getattr(config, name, None) for name in names))]
    for scaling in scalings:
        for cap in caps:
            yield LossFactors(scaling=scaling, cap=cap)


def _labelled(specimen: Specimen) -> dict[str, Any]:
    ids = _tokens(specimen.model, LABELLED, specimen.device)
    labels = ids.clone()
    labels[0, :3] = -100
    return dict(input_ids=ids, labels=labels)


def _states(specimen: Specimen) -> Tensor:  # (N, D)
    """Returns hidden states of the real tokens of a padded row and of one without padding."""
    specimen.model.train()
    ids = _tokens(specimen.model, TOKENS, specimen.device)
    mask = torch.ones_like(ids)
    mask[0, TOKENS - 7 :] = 0
    return specimen.hidden(input_ids=ids, attention_mask=mask)[mask.bool()]


def _tokens(model: Any, count: int, device: torch.device) -> Tensor:  # (ROWS, count)
    draw, vocab = torch.Generator().manual_seed(0), model.config.get_text_config().vocab_size
    return torch.randint(vocab // 4, vocab // 2, (ROWS, count), generator=draw).to(device)


def _attention_dropout(config: Any) -> str | None:
    for name, value in config.to_dict().items():
        if "att" in name and "drop" in name and isinstance(value, float) and value > 0:
            return name
    return None
