"""A save without weights, before step 1: what it would refuse after hours is found in a second.

transformers checks a configuration when it is saved, not when it is loaded, and models are
published with settings it refuses (`temperature` without `do_sample`, `output_attentions` with
SDPA). None of them has to do with training: they are repaired, and it is said.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from longctx.errors import UserError, one_line, print_rank0
from longctx.train.output import STAGING
from longctx.train.output.save import disk_problem


def rehearse_save(trainer: Any) -> None:
    """Lets the first process write configuration, tokenizer and arguments into a folder that is
    deleted again. Raises UserError where they cannot be saved and there is no repair."""
    if not trainer.args.should_save:
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    # Without weights; adapters are small, and PEFT picks them out of the model.
    weights: Any = {} if isinstance(model, PreTrainedModel) else None
    rehearse(
        model,
        lambda folder: trainer._save(folder, state_dict=weights),
        Path(str(trainer.args.output_dir)),
    )


def rehearse(model: Any, write: Callable[[str], Any], output_dir: Path) -> None:
    """Tries any `write(folder)` of a model. Raises UserError."""
    repairs = iter(REPAIRS)
    while (problem := _problem(write, output_dir)) is not None:
        for applies, repair, said in repairs:
            if applies(model):
                repair(model)
                print_rank0(f"transformers would refuse to save the model ({problem}): {said}")
                break
        else:
            raise UserError(f"the trained model could not be saved: {problem}")


def _problem(write: Callable[[str], Any], output_dir: Path) -> str | None:
    """Returns the error that saving raises, in one line."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output_dir, prefix=STAGING) as folder, _quiet():
            write(folder)
    except Exception as error:  # each of transformers' checks has a type of its own
        if reason := disk_problem(error):
            raise UserError(
                f"cannot write to {output_dir} ({reason}): free some space or choose another "
                "--output_dir"
            ) from error
        return one_line(error, 200)
    return None


def _has_generation(model: Any) -> bool:
    return getattr(model, "generation_config", None) is not None


def _sample(model: Any) -> None:
    model.generation_config.do_sample = True


def _default_generation(model: Any) -> None:
    given = model.generation_config
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    kept = {name: value for name in ids if (value := getattr(given, name, None)) is not None}
    model.generation_config = GenerationConfig(**kept)


def _shows_attention(model: Any) -> bool:
    return bool(getattr(model.config, "output_attentions", False))


def _hide_attention(model: Any) -> None:
    model.config.output_attentions = False


Repair = tuple[Callable[[Any], bool], Callable[[Any], None], str]
REPAIRS: tuple[Repair, ...] = (
    (_shows_attention, _hide_attention, "output_attentions is set to false"),
    (_has_generation, _sample, "do_sample is set to true in its generation_config"),
    (_has_generation, _default_generation, "it gets a new generation_config"),
)
"""Repairs of a model that cannot be saved. Those that apply are tried one after another, until it
can."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Switches off the progress bar, as there are no weights to write."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
