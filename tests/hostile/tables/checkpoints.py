"""Checkpoints: damaged, changed, from another run, malicious, moved, or not to be deleted."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hostile.cases import bound_by_permissions, fails, prints, table, works
from hostile.files import (
    Change,
    asking,
    both,
    cut,
    earlier,
    edit,
    empty,
    file,
    flip,
    forged,
    given,
    halve,
    immutable,
    in_file,
    instead,
    last,
    moved,
    planted,
    remade,
    remove,
    resume,
    saved_tensors,
    unlisted,
    write,
)

STATE, MANIFEST = "trainer_state.json", "manifest.json"
WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.pt"
SCHEDULER, RANDOM = "scheduler.pt", "rng_state.pth"
NOT_WHOLE = "checkpoint-4 is no whole checkpoint"
PASSED = r"not resuming from .*checkpoint-4"
CONTINUED = works(steps=6)
EXACT = "--place host"


def unmanifest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()


def manifest_of_outside(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_text(json.dumps({"../../../../etc/passwd": 1}))


DAMAGED = {
    "whole": (resume(), CONTINUED),
    "whole, by the word last": (last(lambda c: None), CONTINUED),
    "whole, by the word auto": (last(lambda c: None, "--resume_from_checkpoint auto"), CONTINUED),
    "the earlier of two": (resume(step=2), CONTINUED),
    **{
        f"last passes over {what}": (last(change), works(PASSED, steps=6))
        for what, change in {
            "cut weights": cut(WEIGHTS),
            "missing weights": remove(WEIGHTS),
            "empty weights": in_file(WEIGHTS, empty),
            "a cut optimizer": cut(OPTIMIZER),
            "a missing optimizer": remove(OPTIMIZER),
            "a cut state": cut(STATE),
            "an empty state": in_file(STATE, empty),
            "a state that is a list": write(STATE, "[]"),
            "a state of other fields": write(STATE, '{"nonsense": 1}'),
            "a cut manifest": cut(MANIFEST),
            "a manifest that is a list": write(MANIFEST, "[]"),
            "a manifest of words": write(MANIFEST, '{"model.safetensors": "big"}'),
            "a missing state": remove(STATE),
            "a missing config": remove("config.json"),
            "flipped weights": in_file(WEIGHTS, flip),
            "a flipped optimizer": in_file(OPTIMIZER, flip),
            "a flipped scheduler": in_file(SCHEDULER, flip),
            "a flipped random state": in_file(RANDOM, flip),
            "a flipped config": in_file("config.json", flip),
            "a flipped tokenizer": in_file("tokenizer.json", flip),
            "a weights file that is a folder": lambda c: (
                (c / WEIGHTS).unlink(),
                (c / WEIGHTS).mkdir(),
            ),
        }.items()
    },
    "all are damaged": (
        earlier(
            lambda run: [halve(c / WEIGHTS) for c in run.glob("checkpoint-*")],
            "--resume_from_checkpoint last",
        ),
        fails("holds no whole checkpoint-N folder"),
    ),
    "all are damaged, by the word auto": (
        earlier(
            lambda run: [halve(c / WEIGHTS) for c in run.glob("checkpoint-*")],
            "--resume_from_checkpoint auto",
        ),
        fails("holds no whole checkpoint-N folder"),
    ),
    "named: cut weights": (resume(cut(WEIGHTS)), fails(NOT_WHOLE + r" \(model.safetensors has")),
    "named: a missing optimizer": (
        resume(remove(OPTIMIZER)),
        fails(NOT_WHOLE + r".*optimizer\.pt"),
    ),
    "named: a cut state": (resume(cut(STATE)), fails(NOT_WHOLE + r".*trainer_state\.json")),
    **{
        f"named: flipped {name}": (resume(in_file(name, flip)), fails(f"checkpoint-4.*{name}"))
        for name in (WEIGHTS, OPTIMIZER, SCHEDULER, RANDOM, STATE, "config.json", "tokenizer.json")
    },
    "a file planted beside the others": (
        resume(write("pytorch_model.bin", b"planted")),
        works("not saved with it: pytorch_model.bin", steps=6),
    ),
    "a manifest of files elsewhere": (resume(manifest_of_outside), fails(NOT_WHOLE)),
    "no manifest": (resume(unmanifest), works("does not say what it was trained with", steps=6)),
    "no manifest and no optimizer": (
        resume(lambda c: (unmanifest(c), (c / OPTIMIZER).unlink())),
        fails("optimizer"),
    ),
    "no manifest and no scheduler": (
        resume(lambda c: (unmanifest(c), (c / SCHEDULER).unlink())),
        fails("scheduler"),
    ),
    "no manifest and no random state": (
        resume(lambda c: (unmanifest(c), (c / RANDOM).unlink())),
        works("holds no random state", steps=6),
    ),
    "no manifest and no weights": (
        resume(lambda c: (unmanifest(c), (c / WEIGHTS).unlink())),
        fails("checkpoint-4"),
    ),
    "no manifest and cut weights": (resume(unlisted(WEIGHTS, halve)), fails("checkpoint-4")),
    "no manifest and a cut optimizer": (resume(unlisted(OPTIMIZER, halve)), fails("checkpoint-4")),
    "no manifest and a cut scheduler": (resume(unlisted(SCHEDULER, halve)), fails("checkpoint-4")),
    "no manifest and a cut random state": (resume(unlisted(RANDOM, halve)), fails("checkpoint-4")),
    "no manifest, an empty optimizer": (resume(unlisted(OPTIMIZER, empty)), fails("checkpoint-4")),
}

MALICIOUS = {
    **{
        f"{name} runs code, as {'a bare pickle' if legacy else 'a zip'}": (
            resume(planted(name, legacy)),
            fails("checkpoint-4.*from another checkpoint"),
        )
        for name in (OPTIMIZER, SCHEDULER, RANDOM, "pytorch_model.bin")
        for legacy in (False, True)
    },
    "training_args.bin runs code": (resume(planted("training_args.bin")), CONTINUED),
    "training_args.bin runs code, bare": (resume(planted("training_args.bin", True)), CONTINUED),
    "scaler.pt runs code": (resume(planted("scaler.pt")), fails("cannot resume from .*-4")),
    "a state of a million steps": (
        resume(lambda c: (edit(STATE, global_step=10**6)(c), unmanifest(c))),
        fails("checkpoint-4"),
    ),
    "a state of negative steps": (
        resume(lambda c: (edit(STATE, global_step=-4)(c), unmanifest(c))),
        fails("checkpoint-4"),
    ),
    "a state of half steps": (
        resume(lambda c: (edit(STATE, global_step=3.5)(c), unmanifest(c))),
        fails("checkpoint-4"),
    ),
    "a state of other steps than its name": (
        resume(lambda c: (edit(STATE, global_step=3)(c), unmanifest(c))),
        fails("checkpoint-4"),
    ),
    "a state of an epoch of NaN": (
        resume(lambda c: (edit(STATE, epoch=float("nan"))(c), unmanifest(c))),
        CONTINUED,
    ),
    "a state whose log is words": (
        resume(lambda c: (edit(STATE, log_history="many")(c), unmanifest(c))),
        fails("checkpoint-4"),
    ),
    "a state of a callback of a stranger": (
        resume(
            lambda c: (edit(STATE, stateful_callbacks={"os.mkdir": {"args": {}}})(c), unmanifest(c))
        ),
        CONTINUED,
    ),
    "a best checkpoint elsewhere": (
        resume(lambda c: (edit(STATE, best_model_checkpoint="/etc")(c), unmanifest(c))),
        CONTINUED,
    ),
    "NaN in Adam's moments": (
        resume(
            saved_tensors(
                OPTIMIZER,
                lambda s: [m["exp_avg"].fill_(float("nan")) for m in s["state"].values()] and s,
            )
        ),
        fails("not finite"),
    ),
    "moments of other shapes": (
        resume(
            saved_tensors(
                OPTIMIZER,
                lambda s: [m.update(exp_avg=torch.zeros(3)) for m in s["state"].values()] and s,
            )
        ),
        fails("checkpoint-4"),
    ),
    "moments of fewer weights": (
        resume(saved_tensors(OPTIMIZER, lambda s: s["state"].pop(0) and s)),
        works("no moments for 1 of 20 weights: they start from zero", steps=6),
    ),
    **{
        f"exact states of {what}": (resume(saved_tensors(OPTIMIZER, change), EXACT), expected)
        for what, (change, expected) in {
            "NaN": (
                lambda s: [m["exp_avg"].fill_(float("nan")) for m in s["state"].values()] and s,
                fails("not finite"),
            ),
            "other shapes": (
                lambda s: [m.update(exp_avg=torch.zeros(3)) for m in s["state"].values()] and s,
                fails(r"checkpoint-4.*exp_avg has \(3,\)"),
            ),
            "fewer weights": (
                lambda s: s["state"].pop(0) and s,
                works("no moments for 1 of 20 weights: they start from zero", steps=6),
            ),
            "nothing": (
                lambda s: s | {"state": {}},
                fails("the optimizer in .*checkpoint-4 has no states"),
            ),
            "a list": (lambda s: [1, 2], fails("checkpoint-4")),
        }.items()
    },
    "exact states of torch's AdamW": (
        resume(words=EXACT),
        works("states of torch's AdamW: they go on in fp32", steps=6),
    ),
    "exact states that are no tensors": (
        resume(lambda c: (write("optimizer.00.safetensors", b"planted")(c), unmanifest(c)), EXACT),
        fails("cannot resume from .*checkpoint-4"),
    ),
    "a group of fewer weights": (
        resume(saved_tensors(OPTIMIZER, lambda s: s["param_groups"][0]["params"].pop() and s)),
        fails("cannot resume from .*parameter group"),
    ),
    "an optimizer without moments": (
        resume(saved_tensors(OPTIMIZER, lambda s: s | {"state": {}})),
        fails("the optimizer in .*checkpoint-4 .*has no states"),
    ),
    "an optimizer without groups": (
        resume(saved_tensors(OPTIMIZER, lambda s: s | {"param_groups": []})),
        fails("checkpoint-4"),
    ),
    "an optimizer that is a list": (
        resume(saved_tensors(OPTIMIZER, lambda s: [1, 2])),
        fails("checkpoint-4"),
    ),
    "SGD's states": (
        resume(
            saved_tensors(
                OPTIMIZER,
                lambda s: s | {"state": {k: {"momentum_buffer": None} for k in s["state"]}},
            )
        ),
        fails("cannot resume from .*checkpoint-4"),
    ),
    "a scheduler that is a list": (
        resume(saved_tensors(SCHEDULER, lambda s: [1])),
        fails("checkpoint-4"),
    ),
    "a scheduler of nothing": (
        resume(saved_tensors(SCHEDULER, lambda s: {"a": 1})),
        fails("checkpoint-4"),
    ),
    "a random state that is a list": (
        resume(saved_tensors(RANDOM, lambda s: [1])),
        fails("checkpoint-4"),
    ),
    "a random state of nothing": (
        resume(saved_tensors(RANDOM, lambda s: {"a": 1})),
        fails("checkpoint-4"),
    ),
    "weights of NaN": (
        resume(unlisted(WEIGHTS, lambda p: p.write_bytes(p.read_bytes()[:-4096] + b"\xff" * 4096))),
        fails("not finite|checkpoint-4"),
    ),
    "weights of another model": (
        resume(
            lambda c: (
                shutil.copy(c.parents[2] / "base/model/tokenizer.json", c / WEIGHTS),
                unmanifest(c),
            )
        ),
        fails("checkpoint-4"),
    ),
}


BEST = (
    "--load_best_model_at_end --eval_file BASE/data/1.txt --eval_strategy steps --eval_steps 2 "
    "--save_steps 2"
)


def best(named: str) -> Change:
    """The state of checkpoint-4 names this as its best, with a loss that nothing comes below."""
    return remade(edit(STATE, best_model_checkpoint=named, best_metric=1e-9, best_global_step=2))


def each_state(key: str, value: Any) -> Callable[[Any], None]:
    """Something else in the states of every weight."""
    return lambda saved: [states.update({key: value}) for states in saved["state"].values()][:0]


def last_lines(path: Path) -> None:
    """A log as long as a state may have, of nothing."""
    path.write_text(json.dumps({"global_step": 4, "log_history": [{}] * 9_000_000}))


FORGED = {
    **{
        f"a manifest whose {part} {what}": (resume(forged(**{part: value})), fails(NOT_WHOLE))
        for part, what, value in (
            ("files", "are a list", []),
            ("files", "are nothing", None),
            ("files", "are sizes alone", {STATE: 4}),
            ("files", "have sizes of words", {STATE: ["4", "0"]}),
            ("files", "have sizes below zero", {STATE: [-1, "0"]}),
            ("files", "have endless sizes", {STATE: [10**300, "0"]}),
            ("files", "lead out of the folder", {"../checkpoint-2/config.json": [3, "0"]}),
            ("files", "are absolute", {"/etc/passwd": [3, "0"]}),
            ("files", "have a NUL", {"a\0b": [3, "0"]}),
            ("files", "have a lone surrogate", {"\ud800": [3, "0"]}),
            ("files", "colour", {"\x1b[31m": [3, "0"]}),
            ("files", "have long names", {"x" * 10**6: [3, "0"]}),
            ("run", "is a list", [1]),
            ("run", "is a word", "mine"),
            ("format", "is a list", [1]),
        )
    },
    "a manifest whose run is empty": (resume(forged(run={})), fails("data .the rows are not")),
    "a manifest whose model is a list": (
        resume(
            lambda c: forged(run=json.loads((c / MANIFEST).read_text())["run"] | {"model": [1]})(c)
        ),
        CONTINUED,
    ),
    "a manifest nested deeply": (resume(write(MANIFEST, "[" * 10**6)), fails(NOT_WHOLE)),
    "a manifest of 300 MB": (
        resume(lambda c: os.truncate(c / MANIFEST, 300 << 20)),
        fails(NOT_WHOLE + ".*manifest.json is unreadable"),
    ),
    **{
        f"a state whose {field} {what}": (
            resume(remade(edit(STATE, **{field: value}))),
            fails(NOT_WHOLE + ".*trainer_state.json is unreadable"),
        )
        for field, what, value in (
            ("global_step", "is true", True),
            ("global_step", "is a word", "4"),
            ("global_step", "is a list", [4]),
            ("global_step", "is endless", 10**300),
            ("epoch", "is a word", "1"),
            ("log_history", "is an object", {}),
            ("log_history", "holds lists", [[1]]),
            ("log_history", "holds words", [{"loss": "low"}]),
            ("log_history", "holds endless numbers", [{"loss": 10**400}]),
            ("log_history", "holds objects", [{"loss": {}}]),
            ("best_metric", "is a word", "best"),
            ("best_model_checkpoint", "is a number", 7),
            ("best_model_checkpoint", "is a list", ["/etc"]),
            ("total_flos", "is a list", []),
            ("nonsense", "is nobody's", 1),
        )
    },
    "a state of nine million lines": (
        resume(remade(in_file(STATE, last_lines))),
        fails(NOT_WHOLE + ".*trainer_state.json is unreadable"),
    ),
    **{
        f"{name} is {what}": (resume(instead(name, make)), fails(NOT_WHOLE))
        for name in (STATE, MANIFEST, OPTIMIZER)
        for what, make in {
            "a pipe": os.mkfifo,
            "an endless device": lambda p: p.symlink_to("/dev/zero"),
            "a folder": Path.mkdir,
        }.items()
    },
    "a pipe that no manifest names": (
        resume(lambda c: os.mkfifo(c / "scaler.pt")),
        fails("scaler.pt is not a regular file"),
    ),
    "last passes over a pipe": (last(instead(OPTIMIZER, os.mkfifo)), works(PASSED, steps=6)),
    **{
        f"{name} asks for 9 GB": (
            resume(remade(asking(name))),
            fails(f"{NOT_WHOLE}.*reading .*{name}.* takes more than .* GiB of memory"),
        )
        for name in (OPTIMIZER, SCHEDULER, RANDOM)
    },
    "last passes over what asks for 9 GB": (
        last(remade(asking(OPTIMIZER))),
        works(PASSED, steps=6),
    ),
    "moments that are larger than their file": (
        resume(
            remade(
                lambda c: torch.save(
                    {"state": {0: {"exp_avg": torch.zeros(1).expand(10**12)}}}, c / OPTIMIZER
                )
            )
        ),
        fails("optimizer.pt holds a tensor that is larger than its bytes"),
    ),
    **{
        f"{how} whose {key} is {what}": (
            resume(saved_tensors(OPTIMIZER, each_state(key, value)), words),
            fails("checkpoint-4"),
        )
        for how, words in (("states", ""), ("exact states", EXACT))
        for key, what, value in (
            ("step", "a word", "four"),
            ("step", "NaN", torch.tensor(float("nan"))),
            ("step", "below zero", torch.tensor(-4.0)),
            ("step", "endless", 10**300),
            ("step", "a list", [4]),
            ("exp_avg", "a number", 4.0),
            ("exp_avg", "a list", [1.0]),
            ("exp_avg_sq", "a word", "x"),
            ("exp_avg_sq", "a scalar", torch.tensor(1.0)),
        )
    },
    **{
        f"a scheduler whose {key} is {what}": (
            resume(saved_tensors(SCHEDULER, lambda s, key=key, value=value: s | {key: value})),
            fails("checkpoint-4"),
        )
        for key, what, value in (
            ("last_epoch", "a word", "four"),
            ("last_epoch", "below zero", -4),
            ("last_epoch", "NaN", float("nan")),
            ("last_epoch", "endless", 10**300),
            ("last_epoch", "a list", [4]),
            ("optimizer", "a number", 7),
            ("base_lrs", "a number", 7),
        )
    },
    # the best checkpoint
    "the best checkpoint of a run that was moved": (
        resume(best("/gone/run/checkpoint-2"), BEST),
        CONTINUED,
    ),
    **{
        f"the best checkpoint is {what}": (
            resume(best(named), BEST),
            works("as its best checkpoint, which is not in .*the best begins again", steps=6),
        )
        for what, named in {
            "another folder": "/etc",
            "a folder above": "../../base/model",
            "one that is gone": "/gone/checkpoint-3",
            "of a terminal": "\x1b[2J",
            "of 5000 digits": "checkpoint-" + "9" * 5000,
        }.items()
    },
    "the best checkpoint is damaged": (
        earlier(
            lambda run: (
                best("checkpoint-2")(run / "checkpoint-4"),
                flip(run / "checkpoint-2" / WEIGHTS),
            ),
            f"--max_steps 6 --resume_from_checkpoint FOLDER/run/checkpoint-4 {BEST}",
        ),
        fails("checkpoint-2 was the best checkpoint and is not whole any more"),
    ),
}

CHANGED = {
    "--seq_len 32": "seq_len",
    "--seed 7": "seed",
    "--data_seed 7": "data_seed",
    "--dtype bfloat16": "dtype",
    "--gradient_accumulation_steps 2": "gradient_accumulation_steps",
    "--per_device_train_batch_size 2": "per_device_train_batch_size",
    "--lr_scheduler_type cosine": "lr_scheduler_type",
    "--optim sgd": "optim",
    "--adam_beta2 0.95": "adam_beta2",
    "--max_grad_norm 0.5": "max_grad_norm",
    "--long_documents truncate": "long_documents",
    "--warmup_steps 3": "warmup_steps",
    "--label_smoothing_factor 0.1": "label_smoothing_factor",
    "--train_file BASE/data/1.txt": "data|train_file",
    "--dataloader_drop_last": "dataloader_drop_last",
    "--train_sampling_strategy sequential": "train_sampling_strategy",
    "--rope_scaling yarn --seq_len 5000": "seq_len|rope_scaling",
}

APPLIED = {
    "--learning_rate 1e-4": "learning_rate 0.003 -> 0.0001",
    "--class_type vanilla": "class_type custom -> vanilla",
    "--weight_decay 0.1": "weight_decay 0 -> 0.1",
    "--logging_steps 1": "",
    "--save_steps 3": "",
    "--save_total_limit 5": "",
    "--disable_tqdm false": "",
    "--tile_tokens 32": "",
    "--head_groups 2": "",
    "--offload_activations all": "",
    "--keep x": "",
    "--save_only_model": "",
}

RESUMED = {
    **{
        f"{words} is refused": (resume(words=words), fails(said)) for words, said in CHANGED.items()
    },
    **{
        f"{words} is let through": (
            resume(words=f"{words} --allow_changed {said.split('|')[0]}"),
            CONTINUED,
        )
        for words, said in CHANGED.items()
        if words.split()[0] not in ("--optim", "--rope_scaling")
    },
    **{
        f"{words} is applied": (resume(words=words), works(said, steps=6))
        for words, said in APPLIED.items()
    },
    "nothing of what is allowed to change": (
        resume(words="--allow_changed nonsense"),
        fails("nonsense"),
    ),
    "fewer steps than were trained": (
        earlier(words="--resume_from_checkpoint FOLDER/run/checkpoint-4 --max_steps 2"),
        works(steps=4),
    ),
    "as many steps as were trained": (
        earlier(words="--resume_from_checkpoint FOLDER/run/checkpoint-4 --max_steps 4"),
        works(steps=4),
    ),
    "a checkpoint of another folder": (
        both(earlier(), given("--resume_from_checkpoint BASE/run/checkpoint-2 --max_steps 6")),
        works(steps=6),
    ),
    "a checkpoint saved without its optimizer": (
        resume(
            lambda c: [(c / name).unlink() for name in (OPTIMIZER, SCHEDULER, RANDOM, MANIFEST)]
        ),
        fails("optimizer"),
    ),
    "final, as a checkpoint": (
        earlier(words="--resume_from_checkpoint FOLDER/run/final"),
        fails("final is no whole checkpoint"),
    ),
    "the run's folder, as a checkpoint": (
        earlier(words="--resume_from_checkpoint FOLDER/run"),
        fails("run is no whole checkpoint"),
    ),
    "a file, as a checkpoint": (
        earlier(words="--resume_from_checkpoint FOLDER/run/metrics.jsonl"),
        fails("no such folder"),
    ),
    "a folder of another name": (
        earlier(
            lambda run: (run / "checkpoint-4").rename(run / "mine"),
            "--max_steps 6 --resume_from_checkpoint FOLDER/run/mine",
        ),
        CONTINUED,
    ),
    "data that has changed": (
        both(
            lambda folder: [str(shutil.copytree(folder.parent / "base/data", folder / "data"))][:0],
            file("data/0.txt", "Something else. " * 90),
            resume(),
            given("--train_file FOLDER/data"),
        ),
        fails("data"),
    ),
    "data of the same bytes elsewhere": (
        both(
            lambda folder: [str(shutil.copytree(folder.parent / "base/data", folder / "data"))][:0],
            resume(),
            given("--train_file FOLDER/data"),
        ),
        CONTINUED,
    ),
}

FOLDERS = {
    "an earlier run, neither resumed nor overwritten": (earlier(), fails("holds an earlier run")),
    "an earlier run, overwritten": (
        earlier(words="--overwrite_output_dir"),
        works().leaving("checkpoint-2", "final"),
    ),
    **{
        f"{what} of the run to be overwritten": (
            earlier(words=f"{words} --overwrite_output_dir"),
            fails("run/(final|checkpoint-4|metrics.jsonl) would be deleted .*which reads"),
        )
        for what, words in (
            ("the model", "--model_name_or_path FOLDER/run/final"),
            ("an adapter's base", "--model_name_or_path FOLDER/run/checkpoint-4 --lora_r 2"),
            ("the tokenizer", "--tokenizer_name FOLDER/run/final/"),
            ("the data", "--eval_file FOLDER/run/final/README.md --eval_strategy epoch"),
            ("the whole folder as data", "--train_file FOLDER/run"),
            ("files by a pattern", "--train_file 'FOLDER/run/*.jsonl'"),
            ("the cache", "--cache_dir FOLDER/run/checkpoint-4"),
        )
    },
    "a final that no run has saved, overwritten": (
        earlier(
            lambda run: (
                shutil.rmtree(run / "final"),
                (run / "final").mkdir(),
                (run / "final" / "thesis.tex").write_text("mine"),
            ),
            "--overwrite_output_dir",
        ),
        fails("final holds nothing that a run has saved"),
    ),
    "later checkpoints are set aside": (
        resume(step=2),
        works("checkpoint-4", steps=6),
    ),
    "checkpoints of odd names": (
        earlier(
            lambda run: [
                (run / f"checkpoint-{n}").mkdir() for n in ("x", "", "-1", "4.5", "٣", "1e3")
            ],
            "--resume_from_checkpoint last --max_steps 6",
        ),
        CONTINUED,
    ),
    "a checkpoint of a huge number": (
        earlier(
            lambda run: (run / f"checkpoint-{'9' * 200}").mkdir(),
            "--resume_from_checkpoint last --max_steps 6",
        ),
        works("not resuming from", steps=6),
    ),
    "a checkpoint that is a file": (
        earlier(
            lambda run: (run / "checkpoint-9").write_text("x"),
            "--resume_from_checkpoint last --max_steps 6",
        ),
        works("not resuming from .*checkpoint-9", steps=6),
    ),
    "a final that is a file": (
        earlier(
            lambda run: (shutil.rmtree(run / "final"), (run / "final").write_text("mine")),
            "--resume_from_checkpoint last --max_steps 6",
        ),
        fails("final is no folder: a run writes there, move it away"),
    ),
    "a checkpoint moved to a bigger disk": (resume(moved), CONTINUED),
    "an older checkpoint moved to a bigger disk": (
        earlier(
            lambda run: moved(run / "checkpoint-2"), "--max_steps 6 --resume_from_checkpoint last"
        ),
        CONTINUED,
    ),
    "both moved, and overwritten": (
        earlier(
            lambda run: [moved(run / name) for name in ("checkpoint-2", "checkpoint-4", "final")],
            "--overwrite_output_dir",
        ),
        works(),
    ),
    "final moved to a bigger disk": (
        earlier(lambda run: moved(run / "final"), "--max_steps 6 --resume_from_checkpoint last"),
        CONTINUED,
    ),
    "a checkpoint that links to nothing": (
        earlier(
            lambda run: (run / "checkpoint-9").symlink_to("nowhere"),
            "--max_steps 6 --resume_from_checkpoint last",
        ),
        works("not resuming from .*checkpoint-9", steps=6),
    ),
    "a checkpoint that links to itself": (
        earlier(
            lambda run: (run / "checkpoint-9").symlink_to("checkpoint-9"),
            "--max_steps 6 --resume_from_checkpoint last",
        ),
        works("not resuming from .*checkpoint-9", steps=6),
    ),
    "a link to nothing, overwritten": (
        earlier(lambda run: (run / "checkpoint-9").symlink_to("nowhere"), "--overwrite_output_dir"),
        works(),
    ),
    "a file that cannot be deleted, rotated": (
        earlier(
            lambda run: immutable(run / "checkpoint-2" / "config.json"),
            "--max_steps 6 --resume_from_checkpoint last",
        ),
        works("checkpoint-2 could not be deleted", steps=6).keeping(".incomplete-checkpoint-2"),
    ),
    "a file that cannot be deleted, overwritten": (
        earlier(
            lambda run: immutable(run / "checkpoint-2" / "config.json"), "--overwrite_output_dir"
        ),
        fails("checkpoint-2"),
    ),
    "a folder that cannot be changed, rotated": (
        earlier(
            lambda run: (run / "checkpoint-2").chmod(0o555),
            "--max_steps 6 --resume_from_checkpoint last",
        ),
        works("checkpoint-2 could not be deleted", steps=6).keeping(".incomplete-checkpoint-2"),
        bound_by_permissions,
    ),
    "a folder that cannot be changed, overwritten": (
        earlier(lambda run: (run / "checkpoint-2").chmod(0o555), "--overwrite_output_dir"),
        fails("checkpoint-2"),
        bound_by_permissions,
    ),
    "a folder that cannot be read, overwritten": (
        earlier(lambda run: (run / "checkpoint-2").chmod(0), "--overwrite_output_dir"),
        fails("checkpoint-2"),
        bound_by_permissions,
    ),
    "a checkpoint that cannot be read": (
        last(lambda c: c.chmod(0)),
        works(PASSED, steps=6),
        bound_by_permissions,
    ),
    "weights that cannot be read": (
        last(lambda c: (c / WEIGHTS).chmod(0)),
        works(PASSED, steps=6),
        bound_by_permissions,
    ),
    "an output folder that cannot be written": (
        earlier(lambda run: run.chmod(0o555), "--max_steps 6 --resume_from_checkpoint last"),
        fails("cannot write to .*run .Permission denied"),
        bound_by_permissions,
    ),
    "metrics that cannot be written": (
        earlier(
            lambda run: (run / "metrics.jsonl").chmod(0o444),
            "--max_steps 6 --resume_from_checkpoint last",
        ),
        CONTINUED,
        bound_by_permissions,
    ),
    "metrics that are a folder": (
        earlier(
            lambda run: ((run / "metrics.jsonl").unlink(), (run / "metrics.jsonl").mkdir()),
            "--max_steps 6 --resume_from_checkpoint last",
        ),
        fails("metrics.jsonl"),
    ),
    "metrics of binary": (
        earlier(
            lambda run: (run / "metrics.jsonl").write_bytes(b"\xff\xfe\0\n" * 9),
            "--max_steps 6 --resume_from_checkpoint last",
        ),
        prints("checkpoint-6|final"),
    ),
    "half a staging folder of a killed run": (
        earlier(
            lambda run: shutil.copytree(
                run / "checkpoint-4", run / ".incomplete-checkpoint-6/checkpoint-6"
            ),
            "--max_steps 6 --resume_from_checkpoint last",
        ),
        CONTINUED,
    ),
    "a staging folder that links elsewhere": (
        earlier(
            lambda run: (run / ".incomplete-checkpoint-6").symlink_to(run / "checkpoint-2"),
            "--max_steps 6 --resume_from_checkpoint last",
        ),
        CONTINUED,
    ),
}

CASES = [
    *table("damaged checkpoints", DAMAGED),
    *table("malicious checkpoints", MALICIOUS),
    *table("forged checkpoints", FORGED),
    *table("resumed with changes", RESUMED),
    *table("output folders", FOLDERS),
]
