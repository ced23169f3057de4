"""Lines of other libraries that are left out, and the ones beside them that still show."""

from __future__ import annotations

import logging
import warnings
from dataclasses import fields

import pytest
from transformers.utils.loading_report import LoadStateDictInfo, log_state_dict_report

from longctx import noise

GREETING = "Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to"
PADDING = (
    "The tokenizer has new PAD/BOS/EOS tokens that differ from the model config and generation "
    "config. The model config and generation config were aligned accordingly, being updated with "
    "the tokenizer's values. Updated tokens: {'pad_token_id': 3}."
)
KERNEL = (
    "Failed to load CPU gemm_4bit_forward from kernels-community: No module named 'kernels'. "
    "Please make sure you already `pip install kernels` and the kernels >= 0.11.1"
)


@pytest.fixture(autouse=True)
def logged():
    """What loggers hand on; filters and levels are as before afterwards."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    names = (*noise._HIDDEN, "transformers.modeling_utils")
    loggers = [logging.getLogger(name) for name in names]
    before = [(list(logger.filters), logger.level) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING)  # whatever a run before asked for
    with warnings.catch_warnings():
        yield found
    for logger, (filters, level) in zip(loggers, before, strict=True):
        logger.removeHandler(handler)
        logger.filters = filters
        logger.setLevel(level)


def test_what_says_nothing_is_left_out_and_nothing_else(logged) -> None:
    noise.hide_noise()
    deepspeed, tokens, kernels = (logging.getLogger(name) for name in noise._HIDDEN)
    deepspeed.warning(GREETING)
    deepspeed.warning("zero1 is slow here")
    kernels.warning(KERNEL)
    kernels.warning("quantised weights need a GPU")
    tokens.warning(PADDING)
    tokens.warning(PADDING.replace("'pad_token_id': 3", "'eos_token_id': 2, 'pad_token_id': 3"))
    assert [line[:18] for line in logged] == [
        "zero1 is slow here",
        "quantised weights ",
        "The tokenizer has ",
    ]
    noise.show_greeting()
    deepspeed.warning(GREETING)
    assert logged[-1] == GREETING


def test_a_program_of_ones_own_hears_them_outside_our_imports(logged) -> None:
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.filters.clear()  # of commands that ran in this process
    with noise.quiet_imports():
        logger.warning(KERNEL)
    assert not logged
    logger.warning(KERNEL)
    assert logged == [KERNEL]


def test_a_deprecated_name_of_transformers_that_peft_asks_for() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        noise.hide_noise()
        for name in ("is_gradient_checkpointing", "is_other"):
            warnings.warn(f"`{name}` is deprecated and will be removed", FutureWarning, 1)
    assert [str(warning.message)[:10] for warning in found] == ["`is_other`"]


@pytest.mark.parametrize(
    ("missing", "unexpected", "shows"),
    [
        ({"score.weight"}, set(), False),
        ({"score.weight", "model.norm.weight"}, set(), True),
        ({"score.weight"}, {"lm_head.weight"}, True),
        ({"model.norm.weight"}, set(), True),
    ],
)
def test_a_report_of_the_head_of_rewards_alone(missing, unexpected, shows, logged) -> None:
    found = {"missing_keys": missing, "unexpected_keys": unexpected}
    empty = {field.name: {} for field in fields(LoadStateDictInfo)}
    info = LoadStateDictInfo(**empty | found)
    logger = logging.getLogger("transformers.modeling_utils")
    with noise.hidden_report("score.weight"):
        log_state_dict_report(noise, "folder", True, info, logger)
    assert bool(logged) == shows
    log_state_dict_report(noise, "folder", True, info, logger)
    assert len(logged) == shows + 1
