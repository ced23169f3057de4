"""Signals in every phase: a run ends as the signal says, with nothing half done, or goes on."""

from __future__ import annotations

from hostile.cases import (
    Case,
    at,
    before,
    ends,
    file_event,
    ignoring,
    on,
    send,
    step,
    table,
    terminal_lost,
    works,
)
from hostile.files import EVAL, both, dataset, earlier, given, texts

STATUS = {"TERM": 143, "INT": 130, "HUP": 129}
FRESH = given("--cache_dir FOLDER/fresh")
EVALUATED = both(FRESH, given("--eval_file BASE/data --eval_strategy steps --eval_steps 2"))
LONG = given("--max_steps 6 --save_total_limit 5")

BEFORE_TRAINING = {
    "reading the options": before("longctx.train.start.options.parse_flags"),
    "loading the tokenizer": before("transformers.AutoTokenizer.from_pretrained"),
    "loading the config": before("transformers.AutoConfig.from_pretrained"),
    "opening the output folder": file_event("mkdir", "*/run"),
    "reading the data": file_event("open", "*/documents-*"),
    "tokenising": file_event("open", "*/tokens-*"),
    "tokenising a batch": before("longctx.train.data.text.tokens.encode"),
    "packing": file_event("open", "*/rows-*.arrow*"),
    "packing a row": before("longctx.train.data.pack.packing.build_row"),
    "writing a checksum": file_event("open", "*.xxh3-*"),
    "renaming a file of the cache": file_event("rename", "*/fresh/*"),
    "loading the weights": before("transformers.AutoModelForCausalLM.from_pretrained"),
    "patching the model": before("longctx.train.start.loading.patch_as"),
    "making the trainer": before("transformers.Trainer.__init__"),
}

IN_TRAINING = {
    "before step 1": on("on_train_begin"),
    "at the start of step 1": on("on_step_begin"),
    "in step 1": step(1),
    "in step 3": step(3),
    "while step 3 is logged": on("on_log", lambda state: state.global_step == 3),
    "writing metrics": file_event("open", "*/metrics.jsonl"),
    "beginning to save": file_event("mkdir", "*/.incomplete-checkpoint-2"),
    "in a save": file_event("open", "*/.incomplete-checkpoint-2/*/config.json"),
    "late in a save": file_event("open", "*/.incomplete-checkpoint-2/*/trainer_state.json"),
    "writing the manifest": file_event("open", "*/.incomplete-checkpoint-2/*/manifest.json"),
    "publishing a checkpoint": file_event("rename", "*/.incomplete-checkpoint-2/checkpoint-2"),
    "after a save": on("on_save"),
    "in the last step": step(6),
    "in the last save": file_event("open", "*/.incomplete-checkpoint-6/*/config.json"),
}

AT_THE_END = {
    "at the end of training": on("on_train_end"),
    "saving final": file_event("mkdir", "*/.incomplete-final"),
    "in final": file_event("open", "*/.incomplete-final/config.json"),
    "publishing final": file_event("rename", "*/.incomplete-final"),
    "after final": before("rich.table.Table.add_row"),
}

IN_EVALUATION = {
    "beginning to evaluate": before("longctx.train.trainer.trainer.LongTrainer.evaluate"),
    "in an evaluation": on("on_prediction_step"),
    "after an evaluation": on("on_evaluate"),
}


def each(phases, make, said: str = "") -> dict[str, tuple]:
    """Every signal at every moment."""
    return {
        f"{name} {phase}": (make, ends(status, said), at(moment, send(name)))
        for phase, moment in phases.items()
        for name, status in STATUS.items()
    }


SIGNALS = {
    **each(BEFORE_TRAINING, FRESH),
    **each(IN_TRAINING, LONG, "continue with --resume_from_checkpoint last"),
    **each(IN_EVALUATION, EVALUATED),
    **each(AT_THE_END, LONG),
    # other signals
    **{
        f"{name} in step 1": (FRESH, works(), at(step(1), send(name)))
        for name in ("PIPE", "WINCH", "CONT", "CHLD", "URG")
    },
    **{
        f"{name} in step 1 ends it": (FRESH, ends(-number), at(step(1), send(name)))
        for name, number in {"KILL": 9, "USR1": 10, "ALRM": 14, "QUIT": 3}.items()
        if name != "KILL"
    },
    # signals together
    "TERM and INT in step 3": (LONG, ends(-2), at(step(3), send("TERM", "INT"))),
    "TERM twice in step 3": (LONG, ends(-15), at(step(3), send("TERM", "TERM"))),
    "TERM in step 2, INT in its save": (
        LONG,
        ends(-2),
        at(step(2), send("TERM")),
        at(file_event("open", "*/.incomplete-checkpoint-2/*/config.json"), send("INT")),
    ),
    "HUP under nohup": (LONG, works(steps=6), ignoring("HUP"), at(step(3), send("HUP"))),
    "HUP under nohup, while packing": (
        FRESH,
        works(),
        ignoring("HUP"),
        at(file_event("open", "*/rows-*"), send("HUP")),
    ),
    "INT of a shell's background job": (
        LONG,
        works(steps=6),
        ignoring("INT"),
        at(step(3), send("INT")),
    ),
    "TERM that is ignored": (LONG, works(steps=6), ignoring("TERM"), at(step(3), send("TERM"))),
    # terminals
    "a terminal lost in step 3": (
        LONG,
        ends(129).leaving("checkpoint-2", "checkpoint-3"),
        terminal_lost(step(3)),
    ),
    "a terminal lost while tokenising": (
        FRESH,
        ends(129).leaving(),
        terminal_lost(file_event("open", "*/tokens-*")),
    ),
    "a terminal lost in a save": (
        LONG,
        ends(129).leaving("checkpoint-2"),
        terminal_lost(file_event("open", "*/.incomplete-checkpoint-2/*/config.json")),
    ),
    "a terminal lost under nohup": (
        LONG,
        works(steps=6),
        ignoring("HUP"),
        terminal_lost(step(3)),
    ),
    # other runs
    "TERM without saving": (
        given("--max_steps 6 --save_strategy no"),
        ends(143, "stopped by SIGTERM: nothing was saved").leaving(),
        at(step(3), send("TERM")),
    ),
    "TERM in a resumed run": (
        earlier(words="--max_steps 8 --resume_from_checkpoint last"),
        ends(143, "continue with").leaving("checkpoint-4", "checkpoint-5", "final"),
        at(step(5), send("TERM")),
    ),
    "TERM while resuming": (
        earlier(words="--max_steps 8 --resume_from_checkpoint last"),
        ends(143).leaving("checkpoint-4", "checkpoint-5", "final"),
        at(before("longctx.train.trainer.trainer.LongTrainer._load_from_checkpoint"), send("TERM")),
    ),
    "TERM before an earlier run is overwritten": (
        earlier(words="--overwrite_output_dir"),
        ends(143).leaving("checkpoint-2", "checkpoint-4", "final"),
        at(before("transformers.AutoModelForCausalLM.from_pretrained"), send("TERM")),
    ),
    "TERM in a stream": (
        both(dataset(texts(400), words="--streaming --max_steps 6")),
        ends(143, "continue with"),
        at(step(3), send("TERM")),
    ),
    "TERM with workers": (
        given("--max_steps 6 --dataloader_num_workers 1"),
        ends(143, "continue with"),
        at(step(3), send("TERM")),
    ),
    "INT with workers": (
        given("--max_steps 6 --dataloader_num_workers 1"),
        ends(130, "continue with"),
        at(step(3), send("INT")),
    ),
    "TERM in an accumulated step": (
        given("--max_steps 6 --gradient_accumulation_steps 3"),
        ends(143, "continue with"),
        at(on("on_substep_end"), send("TERM")),
    ),
    "INT while an example is shown": (
        both(FRESH, given("--show_example")),
        ends(130),
        at(before("longctx.train.data.pack.packing.build_row"), send("INT")),
    ),
    "INT in a report": (
        given("longctx report BASE/run --output FOLDER/page.html"),
        ends(130),
        at(before("longctx.train.report.runs.read_metrics"), send("INT")),
    ),
    "INT in an evaluation of longctx eval": (
        given(EVAL + " --output FOLDER/e.json"),
        ends(130),
        at(before("longctx.train.report.evaluate.token_losses"), send("INT")),
    ),
    "INT in longctx cache": (
        given("longctx cache --cache_dir FOLDER/cache"),
        ends(130),
        at(before("longctx.train.data.pack.prune.table"), send("INT")),
    ),
}

CASES: list[Case] = table("signals", SIGNALS)
