"""Preferences, ratings, rewards and teachers: options, records, other models, caches, signals."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hostile.cases import (
    FULL,
    QUOTA,
    READ_ONLY,
    Make,
    always,
    at,
    before,
    ends,
    fails,
    file_event,
    prints,
    refuse,
    send,
    step,
    table,
    works,
)
from hostile.files import (
    WEIGHTS,
    Change,
    base,
    both,
    cut,
    dataset,
    edit,
    file,
    flip,
    given,
    halve,
    model,
    remove,
)

Record = dict[str, Any]


def turns(role: str, text: str) -> list[Record]:
    return [{"role": role, "content": text}]


PAIR: Record = {"prompt": "why is it so", "chosen": " the sky", "rejected": " a fox jumps"}
PAIRS: list[Record] = [{**PAIR, "prompt": f"why is {n} so", "margin": n / 8} for n in range(12)]
CHATS: list[Record] = [
    {
        "prompt": turns("user", pair["prompt"]),
        "chosen": turns("assistant", pair["chosen"]),
        "rejected": turns("assistant", pair["rejected"]),
    }
    for pair in PAIRS
]
RATED: list[Record] = [
    {"prompt": pair["prompt"], "completion": pair["chosen"], "label": n % 2 > 0}
    for n, pair in enumerate(PAIRS)
]
TEXTS: list[Record] = [
    {"prompt": pair["prompt"], "completion": pair["chosen"] * 9} for pair in PAIRS
]
RECORDS = {"kto": RATED, "sft": TEXTS, "distill": TEXTS}
"""By task; pairs for the others."""
ALL = ("sft", "dpo", "kto", "orpo", "cpo", "simpo", "reward", "distill")
OF_PAIRS = ("dpo", "orpo", "cpo", "simpo", "reward")
OURS = "--teacher BASE/run/final"


def jsonl(records: Sequence[Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def task(name: str, words: str = "", records: Sequence[Any] | None = None) -> Make:
    """A run for a task, on records that are good unless others are given."""
    records = RECORDS.get(name, PAIRS) if records is None else records
    teacher = OURS if name == "distill" and "--teacher" not in words else ""
    return both(file("records.jsonl", jsonl(records)), given(f"--task {name} {teacher} {words}"))


def second(name: str, record: Any, words: str = "") -> Make:
    """A second record that is not like the others."""
    good = RECORDS.get(name, PAIRS)
    return task(name, words, [good[0], record, *good[2:]])


def other(flag: str, change: Change, name: str = "other") -> Make:
    """Another model than the one that is trained, in which something is changed."""

    def make(folder: Path) -> list[str]:
        start = "run/final" if flag == "--teacher" else "model"  # a teacher that knows more
        copy = shutil.copytree(base(folder) / start, folder / name)
        (copy / "manifest.json").unlink(missing_ok=True)
        change(copy)
        return [flag, str(copy)]

    return make


def tensors(change: Callable[[dict[str, Any]], object]) -> Change:
    """Other tensors in a model's file of weights."""

    def edit_tensors(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        found = load_file(folder / WEIGHTS)
        change(found)
        save_file(found, folder / WEIGHTS, {"format": "pt"})

    return edit_tensors


def broken(name: str) -> Change:
    """A model with one number that is none."""
    return tensors(lambda found: found[name].view(-1)[0].fill_(float("nan")))


def wider(folder: Path) -> None:
    """A model with eight more entries in its vocabulary."""
    import torch

    def widen(found: dict[str, Any]) -> None:
        for name in [name for name in found if "embed" in name or "lm_head" in name]:
            found[name] = torch.cat([found[name], found[name][:8]])

    tensors(widen)(folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    edit("config.json", vocab_size=size + 8)(folder)


def swapped(folder: Path) -> None:
    """A tokenizer in which two tokens have changed places."""
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text())
    vocab = found["model"]["vocab"]
    a, b = [*vocab][100:102]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    path.write_text(json.dumps(found))


def adapter(folder: Path) -> None:
    """What a LoRA run leaves: no model."""
    for name in (WEIGHTS, "config.json"):
        (folder / name).unlink()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')


def classifier(labels: int) -> Change:
    """A model with a head of so many classes."""

    def change(folder: Path) -> None:
        import torch

        def add_head(found: dict[str, Any]) -> None:
            found.pop("lm_head.weight", None)
            found["score.weight"] = torch.ones(labels, 32)

        tensors(add_head)(folder)
        names = {str(n): f"LABEL_{n}" for n in range(labels)}
        edit("config.json", architectures=["LlamaForSequenceClassification"], id2label=names)(
            folder
        )

    return change


def untied(folder: Path) -> None:
    """A model whose lm_head is a matrix of its own."""
    tensors(lambda found: found.update({"lm_head.weight": found["model.embed_tokens.weight"] + 0}))(
        folder
    )
    edit("config.json", tie_word_embeddings=False)(folder)


def no_template(folder: Path) -> None:
    for name in ("chat_template.jinja",):
        (folder / name).unlink(missing_ok=True)
    edit("tokenizer_config.json", chat_template=...)(folder)


def after(name: str, words: str = "", change: Change = lambda folder: None, then: str = "") -> Make:
    """A run of two steps with a checkpoint, then `change` in the case's folder, then a run with
    the words `then`."""

    def make(folder: Path) -> list[str]:
        from longctx.train.commands import train

        task(name)(folder)
        at = str(base(folder))
        run = ["--model_name_or_path", f"{at}/model", "--seq_len", "64", "--use_cpu", "true"]
        run += ["--train_file", str(folder / "records.jsonl"), "--cache_dir", str(folder / "cache")]
        run += ["--learning_rate", "0.003", "--disable_tqdm", "true", "--save_steps", "2"]
        run += ["--max_steps", "2", "--output_dir", str(folder / "run")]
        first = both(task(name, words))(folder)[2:]
        train.main([*run, *(word.replace("BASE", at) for word in first)])
        change(folder)
        more = shlex.split(then)
        return ["--train_file", str(folder / "records.jsonl"), "--max_steps", "4", *more]

    return make


def cached(kind: str, change: Change) -> Change:
    """Changes the files of a kind in the cache."""

    def each(folder: Path) -> None:
        found = sorted((folder / "cache").glob(f"{kind}-*.arrow"))
        assert found, kind
        for path in found:
            change(path)

    return each


def no_cache(folder: Path) -> None:
    shutil.rmtree(folder / "cache")


ON = "--resume_from_checkpoint last"
FRESH = "--cache_dir FOLDER/fresh"

OPTIONS = {
    words: (given(words), expected)
    for words, expected in {
        "--task dop": fails("--task.*invalid choice: 'dop'.*did you mean.*dpo|--task.*dop.*dpo"),
        "--task ''": fails("--task"),
        "--task dpo sft": fails("unexpected word 'sft'"),
        "--task DPO": fails("--task.*DPO"),
        "--task ppo": fails("--task.*invalid choice: 'ppo'"),
    }.items()
}

LOSSES = {
    "a loss type of nobody": (
        task("dpo", "--loss_type sigmiod"),
        fails("--loss_type sigmiod: .*sigmoid"),
    ),
    "kto's loss type with dpo": (
        task("dpo", "--loss_type kto"),
        fails("--loss_type kto: --task dpo needs one of sigmoid"),
    ),
    "dpo's loss type with kto": (
        task("kto", "--loss_type sigmoid"),
        fails("--loss_type sigmoid: --task kto needs one of kto"),
    ),
    "two loss types with kto": (
        task("kto", "--loss_type kto apo_zero_unpaired"),
        fails("--loss_type.*takes one"),
    ),
    "simpo as cpo's loss type": (task("cpo", "--loss_type simpo"), fails("--loss_type simpo")),
    "two loss types with cpo": (
        task("cpo", "--loss_type sigmoid hinge"),
        fails("--loss_type.*takes one"),
    ),
    "a loss type with sft": (task("sft", "--loss_type sigmoid"), fails("--loss_type sigmoid")),
    "a loss type with orpo": (task("orpo", "--loss_type sigmoid"), fails("it has one loss")),
    "a loss type twice": (task("dpo", "--loss_type sigmoid sigmoid"), works()),
    "an empty loss type": (task("dpo", "--loss_type ''"), fails("--loss_type")),
    "weights of another number": (
        task("dpo", "--loss_type sigmoid sft --loss_weights 1"),
        fails("--loss_weights must hold one weight for each"),
    ),
    "a weight that is no number": (
        task("dpo", "--loss_weights nan"),
        fails("--loss_weights must be a number"),
    ),
    "a weight that is a word": (task("dpo", "--loss_weights much"), fails("--loss_weights")),
    "weights of nothing": (
        task("dpo", "--loss_type sft --loss_weights 0"),
        fails("--loss_weights of 0 alone"),
    ),
    "weights below nothing": (task("dpo", "--loss_weights -1"), works()),
    "beta 0": (task("dpo", "--beta 0"), fails("--beta must be above 0")),
    "beta below 0": (task("dpo", "--beta -0.1"), fails("--beta must be above 0")),
    "beta nan": (task("dpo", "--beta nan"), fails("--beta must be a number")),
    "beta inf": (task("dpo", "--beta inf"), fails("--beta")),
    "a huge beta": (task("dpo", "--beta 1e6"), works()),
    "a tiny beta": (task("dpo", "--beta 1e-30 --loss_type ipo"), fails("not finite|--beta")),
    "smoothing of a half": (
        task("dpo", "--label_smoothing 0.5"),
        fails("--label_smoothing must be below 0.5"),
    ),
    "exo without smoothing": (
        task("dpo", "--loss_type exo_pair"),
        fails("--label_smoothing of 'exo_pair' must be .*0"),
    ),
    "exo with smoothing": (task("dpo", "--loss_type exo_pair --label_smoothing 1e-3"), works()),
    "smoothing of a loss that reads none": (
        task("dpo", "--loss_type apo_zero --label_smoothing 0.1"),
        works("--label_smoothing needs --loss_type exo_pair, robust"),
    ),
    "ld_alpha 2": (task("dpo", "--ld_alpha 2"), fails("--ld_alpha must be at most 1")),
    "ld_alpha 0": (task("dpo", "--ld_alpha 0"), works()),
    "a divergence where there is none": (
        task("dpo", "--loss_type apo_zero --f_divergence_type forward_kl"),
        fails("--f_divergence_type must be 'reverse_kl'"),
    ),
    "a divergence of nobody": (
        task("dpo", "--f_divergence_type total"),
        fails("--f_divergence_type.*total"),
    ),
    "alpha without its divergence": (
        task("dpo", "--f_alpha_divergence_coef 0.3"),
        works("needs --f_divergence_type alpha_divergence"),
    ),
    "alpha 0": (
        task("dpo", "--f_divergence_type alpha_divergence --f_alpha_divergence_coef 0"),
        works(),
    ),
    "tau 0": (task("dpo", "--loss_type discopop --discopop_tau 0"), fails("--discopop_tau")),
    "cpo_alpha below 0": (task("cpo", "--cpo_alpha -1"), fails("--cpo_alpha must be at least 0")),
    "gamma nan": (task("simpo", "--simpo_gamma nan"), fails("--simpo_gamma must be a number")),
    "no weight for either": (
        task("kto", "--desirable_weight 0 --undesirable_weight 0"),
        fails("--desirable_weight 0 and --undesirable_weight 0 train nothing"),
    ),
    "distill_beta 2": (
        task("distill", "--distill_beta 2"),
        fails("--distill_beta must be at most"),
    ),
    "temperature 0": (task("distill", "--temperature 0"), fails("--temperature must be above 0")),
    "a tiny temperature": (task("distill", "--temperature 1e-30"), prints("Done")),
    "center nan": (
        task("reward", "--center_rewards_coefficient nan"),
        fails("--center_rewards_coefficient must be a number"),
    ),
    **{
        f"{option} with {name}": (
            task(name, f"--{option} {value}"),
            works(f"--{option} needs --task .*; without it, the option has no effect"),
        )
        for name, option, value in (
            ("sft", "beta", "0.2"),
            ("sft", "reference", "BASE/model"),
            ("orpo", "reference", "BASE/nowhere"),
            ("reward", "label_smoothing", "0.1"),
            ("dpo", "simpo_gamma", "1"),
            ("kto", "ld_alpha", "0.5"),
            ("dpo", "teacher", "BASE/nowhere"),
            ("dpo", "desirable_weight", "2"),
            ("cpo", "loss_weights", "2"),
        )
    },
}

ELSEWHERE = {
    **{
        f"{name} with label_smoothing_factor": (
            task(name, "--label_smoothing_factor 0.1"),
            fails("--label_smoothing_factor is of the loss of --task sft"),
        )
        for name in ("dpo", "distill")
    },
    **{
        f"{name} over processes that share rows": (
            task(name, "--sequence_parallel_size 2"),
            fails("--sequence_parallel_size"),
        )
        for name in ("dpo", "reward")
    },
    **{f"vanilla {name}": (task(name, "--class_type vanilla"), works()) for name in ALL},
    **{
        f"compiled {name}": (
            task(name, "--torch_compile"),
            works().keeping("torchinductor_root"),
        )
        for name in ("dpo", "kto", "reward", "distill")
    },
    **{
        f"noise for {name}": (task(name, "--neftune_noise_alpha 5"), works())
        for name in ("dpo", "kto", "distill")
    },
    "liger dpo": (task("dpo", "--class_type liger"), fails("--class_type liger needs")),
    "rows by length": (
        task("dpo", "--train_sampling_strategy group_by_length"),
        fails("orders rows by length"),
    ),
    "the flag of older versions": (task("dpo", "--group_by_length"), fails("unknown option")),
    "TRL's max_length": (task("dpo", "--max_length 64"), fails("unknown option --max_length")),
    "TRL's ref_model": (task("dpo", "--ref_model BASE/model"), fails("unknown option --ref_model")),
    "TRL's precompute_ref_log_probs": (
        task("dpo", "--precompute_ref_log_probs"),
        fails("unknown option"),
    ),
    "more steps than an epoch": (task("dpo", "--max_steps 20"), works(steps=20)),
    "more accumulation than data": (task("kto", "--gradient_accumulation_steps 500"), works()),
    "a batch of more than all rows": (
        task("dpo", "--per_device_train_batch_size 500"),
        works(),
    ),
    "one epoch": (task("reward", "--max_steps -1 --num_train_epochs 1"), prints("Done")),
    "columns removed": (task("dpo", "--remove_unused_columns true"), works()),
    "workers": (task("kto", "--dataloader_num_workers 1"), works()),
    "shared prefixes": (task("dpo", "--share_prefixes"), works()),
    "exact states for dpo": (task("dpo", "--place host --dtype bfloat16"), works()),
    "rope of longer rows": (
        task("dpo", "--seq_len 8192 --rope_scaling yarn"),
        works("context extended"),
    ),
    "rows longer than positions": (task("dpo", "--seq_len 8192"), fails("max_position_embeddings")),
    **{f"an example of {name}": (task(name, "--show_example"), prints("one row")) for name in ALL},
    "an example of what is missing": (given("--task kto --show_example"), fails("--task kto")),
    "bf16": (task("dpo", "--bf16"), works()),
    "smallest rows": (
        task("dpo", "--seq_len 2"),
        fails("prompt and answers take .* more than --seq_len 2"),
    ),
    # adapters
    **{
        f"adapters for {name}": (task(name, "--lora_r 4"), prints("LoRA of rank 4")) for name in ALL
    },
    "an adapter on lm_head": (
        task("dpo", "--lora_r 4 --lora_targets lm_head"),
        fails("--lora_targets lm_head: it is trained as a whole"),
    ),
    "lm_head beside adapters": (
        both(
            model(untied),
            task("dpo", "--lora_r 4 --lora_modules_to_save lm_head"),
        ),
        prints("Done"),
    ),
    "lm_head of rewards": (
        both(
            model(untied),
            task("reward", "--lora_r 4 --lora_modules_to_save lm_head"),
        ),
        fails("lm_head"),
    ),
    "score as a target": (
        task("reward", "--lora_r 4 --lora_targets score"),
        fails("--lora_targets score"),
    ),
    "adapters that are resumed as rewards": (
        after("reward", "--lora_r 4", then=f"--task reward --lora_r 4 {ON}"),
        prints("Done"),
    ),
    # evaluation
    "evaluation of text": (
        task("dpo", "--eval_file BASE/data --eval_strategy steps --eval_steps 1"),
        fails("0.txt is plain text, but a task of pairs reads"),
    ),
    "evaluation of ratings": (
        both(file("e.jsonl", jsonl(RATED), "--eval_file"), task("dpo", "--eval_strategy epoch")),
        fails(r"e.jsonl:1.*`chosen` and `rejected`"),
    ),
    "evaluation of one pair": (
        both(
            file("e.jsonl", jsonl(PAIRS[:1]), "--eval_file"),
            task("dpo", "--eval_strategy steps --eval_steps 1"),
        ),
        works("1 pair, "),
    ),
    "evaluation of one rating": (
        both(file("e.jsonl", jsonl(RATED[:1]), "--eval_file"), task("kto")),
        fails("e.jsonl.*at least two records|at least two records"),
    ),
    "evaluation of desirable answers": (
        both(
            file("e.jsonl", jsonl([r for r in RATED if r["label"]]), "--eval_file"),
            task("kto", "--eval_strategy steps --eval_steps 1"),
        ),
        works("6 of them desirable"),
    ),
    "the best by evaluation": (
        both(
            file("e.jsonl", jsonl(CHATS), "--eval_file"),
            task("dpo", "--eval_strategy steps --eval_steps 1 --save_steps 1"),
            given("--load_best_model_at_end"),
        ),
        works("12 pairs"),
    ),
    "a best accuracy": (
        both(
            file("e.jsonl", jsonl(PAIRS), "--eval_file"),
            task("dpo", "--eval_strategy steps --load_best_model_at_end"),
            given("--metric_for_best_model rewards/accuracies"),
        ),
        fails("--metric_for_best_model must be loss"),
    ),
    # several tasks on one folder
    "another task on one cache": (
        after("dpo", then="--task orpo --output_dir FOLDER/b"),
        works(steps=4),
    ),
    "ratings of a folder of pairs": (
        after("dpo", then="--task kto"),
        fails("--overwrite_output_dir|--resume_from_checkpoint"),
    ),
    "pairs read as ratings": (
        after("dpo", then="--task kto --output_dir FOLDER/b"),
        works("12 prompts with 24 answers, 12 of them desirable", steps=4),
    ),
    "pairs read as text": (
        after("dpo", then="--task sft --output_dir FOLDER/b"),
        fails("records.jsonl:1.*--task dpo"),
    ),
}

DATA = {
    **{
        f"{name} without data": (
            lambda folder, name=name: ["without --train_file", "--task", name],
            fails("(a task of pairs|--task kto) needs records with"),
        )
        for name in ("dpo", "kto", "reward")
    },
    "dpo of files of text": (
        given("--task dpo"),
        fails(r"\.txt is plain text, but a task of pairs reads"),
    ),
    "kto of files of text": (given("--task kto"), fails(r"\.txt.*--task kto")),
    "a stream of pairs": (
        both(
            dataset({"prompt": ["p"] * 9, "chosen": ["a"] * 9, "rejected": ["b"] * 9}),
            given("--task dpo --streaming"),
        ),
        fails("--streaming"),
    ),
    "a dataset of pairs": (
        both(
            dataset({"prompt": ["p"] * 9, "chosen": ["a"] * 9, "rejected": ["b"] * 9}),
            given("--task dpo"),
        ),
        works("9 pairs"),
    ),
    "a dataset of text": (
        both(dataset({"text": ["t"] * 9}), given("--task dpo")),
        fails("row 0.*`chosen` and `rejected`"),
    ),
    "dpo of text": (second("dpo", {"text": "t"}), fails(":2.*`chosen` and `rejected`")),
    "dpo of exchanges": (task("dpo", records=TEXTS), fails(":1.*`chosen` and `rejected`")),
    "dpo of ratings": (task("dpo", records=RATED), fails(":1.*--task kto|:1.*`chosen`")),
    "sft of pairs": (task("sft", records=PAIRS), fails(":1.*--task dpo")),
    "sft of chats of pairs": (task("sft", records=CHATS), fails(":1.*--task dpo")),
    "sft of ratings": (task("sft", records=RATED), fails(":1.*--task kto")),
    "distill of pairs": (task("distill", records=PAIRS), fails(":1.*--task dpo")),
    "kto of exchanges": (task("kto", records=TEXTS), fails(":1.*`label`")),
    "kto of one record": (task("kto", records=RATED[:1]), fails("at least two records")),
    "dpo of one record": (task("dpo", records=PAIRS[:1]), works("1 pair, ")),
    "kto of desirable answers": (
        task("kto", records=[{**r, "label": True} for r in RATED]),
        works("12 of them desirable"),
    ),
    "kto of undesirable answers": (
        task("kto", records=[{**r, "label": False} for r in RATED]),
        works("0 of them desirable"),
    ),
    **{
        f"the label {json.dumps(label)}": (
            second("kto", {**RATED[1], "label": label}),
            fails(":2: `label` must be true"),
        )
        for label in ("good", 2, 0.5, [], {})
    },
    "the label null": (second("kto", {**RATED[1], "label": None}), fails(":2.*label")),
    "equal pairs": (
        task("dpo", records=[{**p, "rejected": p["chosen"]} for p in PAIRS]),
        fails("12 records with equal answers"),
    ),
    "an equal pair": (second("dpo", {**PAIR, "rejected": PAIR["chosen"]}), works("1 with equal")),
    "an empty answer": (second("dpo", {**PAIR, "chosen": ""}), fails(":2: `chosen` is empty")),
    "an answer of blanks": (second("dpo", {**PAIR, "rejected": " \n"}), fails(":2: `rejected`")),
    "an answer of null": (second("dpo", {**PAIR, "rejected": None}), fails(":2")),
    "an answer that is a number": (
        second("dpo", {**PAIR, "chosen": 7}),
        fails(":2: `chosen` must be a string or turns, found a number"),
    ),
    "no prompt": (second("dpo", {"chosen": "a", "rejected": "b"}), fails(":2.*no prompt")),
    "an empty prompt": (second("dpo", {**PAIR, "prompt": ""}), works("12 pairs")),
    "prompts that differ": (
        second(
            "dpo",
            {
                "chosen": turns("user", "a") + turns("assistant", "b"),
                "rejected": turns("user", "c") + turns("assistant", "d"),
            },
        ),
        fails(":2.*share no first turn"),
    ),
    "a prompt that is not theirs": (
        second(
            "dpo",
            {
                "prompt": "another",
                "chosen": turns("user", "a") + turns("assistant", "b"),
                "rejected": turns("user", "a") + turns("assistant", "d"),
            },
        ),
        fails(":2.*do not both begin with `prompt`"),
    ),
    "one string, one list": (
        second("dpo", {**PAIR, "chosen": turns("assistant", "a")}),
        fails(":2.*write both alike"),
    ),
    "an answer of the user": (
        second("dpo", {**CHATS[0], "chosen": turns("user", "a")}),
        fails(":2"),
    ),
    "empty turns": (second("dpo", {**CHATS[0], "rejected": []}), fails(":2.*`rejected`")),
    **{
        f"the margin {margin}": (
            second("reward", {**PAIR, "margin": margin}),
            fails(":2: `margin` must be a number"),
        )
        for margin in (float("nan"), float("inf"), "much", True, [], 1e39)
    },
    "a margin that dpo does not read": (second("dpo", {**PAIR, "margin": 3}), works("12 pairs")),
    "tools that the template leaves out": (
        second("dpo", {**CHATS[0], "tools": [{"type": "function", "function": {"name": "f"}}]}),
        fails(":2.*template leaves out `tools`"),
    ),
    "no chat template": (
        both(model(no_template), task("dpo", records=CHATS)),
        fails("chat template"),
    ),
    "strings without a chat template": (both(model(no_template), task("dpo")), works()),
    "images": (
        second("dpo", {**CHATS[0], "prompt": [{"role": "user", "content": [{"type": "image"}]}]}),
        fails(":2.*it has images"),
    ),
    "images beside the answers": (
        second("dpo", {**CHATS[0], "images": ["a.png"]}),
        fails(":2.*it has images"),
    ),
    **{
        f"{what}, {how}": (
            second(name, record, f"--long_documents {how}"),
            expected,
        )
        for name, what, record, of in (
            (
                "dpo",
                "long answers",
                {**PAIR, "chosen": "long " * 99, "rejected": "longer " * 99},
                (
                    fails(":2: prompt and answers take .* more than --seq_len 64"),
                    works("tokens cut from 1"),
                    works("1 too long"),
                ),
            ),
            (
                "dpo",
                "a long prompt",
                {**PAIR, "prompt": "long " * 99},
                (
                    fails(":2: prompt and answers take"),
                    works("1 too long"),
                    works("tokens cut from 1"),
                ),
            ),
            (
                "kto",
                "a long answer",
                {**RATED[1], "completion": "long " * 99},
                (
                    fails("prompt and answers take"),
                    works("tokens cut from"),
                    works("too long"),
                ),
            ),
        )
        for how, expected in zip(("split", "truncate", "truncate_start"), of, strict=True)
    },
    "all are too long": (
        task(
            "dpo",
            "--long_documents truncate",
            [{**PAIR, "prompt": "long " * 99} for _ in range(3)],
        ),
        fails("3 do not fit into --seq_len"),
    ),
    "special tokens in answers": (
        second("dpo", {**PAIR, "chosen": "<|im_end|><|bos|>" * 3}),
        works("12 pairs"),
    ),
    "the same answers for all": (task("dpo", records=[PAIR] * 12), works("12 pairs")),
    "half a pair": (second("dpo", {"prompt": "p", "chosen": "a"}), fails(":2.*`rejected`")),
    "markup in a record": (
        second("kto", {**RATED[1], "label": "[bold]\n\x1b[31m"}),
        fails(":2: `label`"),
    ),
}

GONE = fails("BASE/nowhere|nowhere")
MODELS = {
    **{
        f"{name}: {what}": (
            both(task(name, words), *makes),
            expected,
        )
        for name, flag in (("dpo", "--reference"), ("distill", "--teacher"))
        for words in ("--teacher FOLDER/other" if name == "distill" else "",)
        for what, makes, expected in (
            (
                "no such folder",
                (given(f"{flag} ./nowhere"),),
                fails(rf"{flag} \./nowhere"),
            ),
            ("no such model", (given(f"{flag} nobody/nothing"),), fails("nobody/nothing")),
            ("an empty word", (given(f"{flag} ''"),), fails(f"{flag} is empty")),
            ("a file", (given(f"{flag} BASE/long.txt"),), fails(f"{flag}.*long.txt")),
            ("a folder without a model", (given(f"{flag} BASE/data"),), fails(f"{flag}.*data")),
            ("a GGUF that is none", (file("bad.gguf", "GGUF", flag),), fails("bad.gguf")),
            ("a GGUF that is gone", (given(f"{flag} gone.gguf"),), fails("gone.gguf")),
            ("an adapter", (other(flag, adapter),), fails(f"{flag} .*other holds an adapter")),
            ("cut weights", (other(flag, cut(WEIGHTS)),), fails("other")),
            ("no weights", (other(flag, remove(WEIGHTS)),), fails("other")),
            ("a cut config", (other(flag, cut("config.json")),), fails("other.*config.json")),
            (
                "a weight less",
                (other(flag, tensors(lambda t: t.pop("model.norm.weight"))),),
                fails("other.*model.norm.weight"),
            ),
            (
                "a wider vocabulary",
                (other(flag, wider),),
                fails(f"{flag} .*its vocabulary has"),
            ),
            (
                "weights that are no numbers",
                (other(flag, broken("model.norm.weight")),),
                fails(f"{flag} .*not finite"),
            ),
            (
                "itself",
                (given(f"{flag} BASE/model"),),
                works() if name == "dpo" else prints("Done"),
            ),
            (
                "short positions",
                (other(flag, edit("config.json", max_position_embeddings=32)),),
                fails(f"above {flag}'s max_position_embeddings")
                if name == "dpo"
                else works("extended"),
            ),
            ("a model of rewards", (other(flag, classifier(1)),), prints("other is a classifier")),
            (
                "another type",
                (other(flag, edit("config.json", model_type="bert", architectures=["BertModel"])),),
                fails("other"),
            ),
            ("a pipe", (other(flag, lambda f: os.mkfifo(f / "pipe")),), fails("pipe")),
        )
    },
    "no teacher": (
        both(file("records.jsonl", jsonl(TEXTS)), given("--task distill")),
        fails("--task distill needs --teacher"),
    ),
    "a teacher of other words": (
        both(task("distill"), other("--teacher", swapped)),
        fails("--teacher .*its tokenizer gives other numbers"),
    ),
    "a teacher without a tokenizer": (
        both(task("distill"), other("--teacher", remove("tokenizer.json"))),
        works(),
    ),
    "a teacher in 4 bits": (
        task("distill", f"{OURS} --teacher_quantize nf4"),
        fails("nf4|bitsandbytes|GPU"),
    ),
    "a reference of other weights": (
        both(
            task("dpo"), other("--reference", tensors(lambda t: [x.mul_(1.1) for x in t.values()]))
        ),
        works(),
    ),
    "rewards from several classes": (
        both(model(classifier(3)), task("reward")),
        fails("broken.*3 classes|3 classes.*start from the base model"),
    ),
    "rewards from one class": (both(model(classifier(1)), task("reward")), works()),
    "sft from a model of rewards": (
        both(model(classifier(1)), task("sft")),
        works("broken is a classifier or a model of rewards"),
    ),
    "dpo from a model of rewards": (
        both(model(classifier(1)), task("dpo")),
        works("broken is a classifier or a model of rewards"),
    ),
    "rewards from a vision model": (
        both(
            model(
                edit(
                    "config.json",
                    model_type="gemma3",
                    architectures=["Gemma3ForConditionalGeneration"],
                    text_config={"model_type": "gemma3_text"},
                )
            ),
            task("reward"),
        ),
        fails(""),
    ),
    "rewards of a preset": (
        both(task("reward"), given("--preset tiny")),
        prints("Done"),
    ),
    "weights that are no numbers": (
        both(model(broken("model.norm.weight")), task("dpo")),
        fails("not finite"),
    ),
    "rewards from weights that are no numbers": (
        both(model(broken("model.norm.weight")), task("reward")),
        fails("not finite"),
    ),
}


def broken_nothing(folder: Path) -> None:
    """Leaves the model as it is."""


IN_THE_PASS = file_event("open", "*/fresh/reference-*")
SCORING = before("longctx.train.tasks.reference.ReferencePass._scored")
CACHE = {
    **{
        f"a reference of which {what}": (
            after("dpo", change=cached("reference", change), then=f"--task dpo {ON}"),
            works("rebuilding the damaged cache file .*reference", steps=4),
        )
        for what, change in {
            "half is left": halve,
            "a bit has flipped": flip,
            "nothing is left": lambda path: os.truncate(path, 0),
            "the end has flipped": lambda path: flip(path, 0.99),
        }.items()
    },
    "a reference without its checksum": (
        after(
            "dpo",
            change=cached("reference", lambda p: p.with_name(p.name + ".xxh3").unlink()),
            then=f"--task dpo {ON}",
        ),
        works(steps=4),
    ),
    "a reference that is a folder": (
        after(
            "dpo",
            change=cached("reference", lambda p: (p.unlink(), p.mkdir())),
            then=f"--task dpo {ON}",
        ),
        fails("reference-.*--cache_dir|cannot write"),
    ),
    "resumed without a cache": (
        after("dpo", change=no_cache, then=f"--task dpo {ON}"),
        works(steps=4),
    ),
    "ratings resumed without a cache": (
        after("kto", change=no_cache, then=f"--task kto {ON}"),
        works(steps=4),
    ),
    "resumed for another task": (
        after("dpo", then=f"--task orpo {ON}"),
        fails("checkpoint-2 is of another run: .*task dpo -> orpo|task"),
    ),
    "resumed as text": (after("distill", then=f"--task sft {ON}"), fails("of another run.*task")),
    "resumed with another beta": (
        after("dpo", then=f"--task dpo --beta 0.5 {ON}"),
        fails("of another run: beta 0.1 -> 0.5"),
    ),
    "resumed with another beta that is allowed": (
        after("dpo", then=f"--task dpo --beta 0.5 {ON} --allow_changed beta"),
        works(steps=4),
    ),
    "resumed with another reference": (
        both(after("dpo", then=f"--task dpo {ON}"), other("--reference", broken_nothing)),
        works(steps=4),
    ),
    "resumed with a changed reference": (
        both(
            after("dpo", then=f"--task dpo {ON}"),
            other("--reference", tensors(lambda t: [x.mul_(1.1) for x in t.values()])),
        ),
        fails("of another run: .*reference"),
    ),
    "resumed with another teacher": (
        both(
            after("distill", then=f"--task distill {ON}"),
            other("--teacher", tensors(lambda t: [x.mul_(1.1) for x in t.values()])),
        ),
        fails("of another run: .*teacher"),
    ),
    "resumed with an option of another task": (
        after("dpo", then=f"--task dpo --simpo_gamma 2 {ON}"),
        fails("of another run: simpo_gamma"),
    ),
    "resumed with a changed label": (
        after(
            "kto",
            change=lambda f: file(
                "records.jsonl", jsonl([{**RATED[0], "label": True}, *RATED[1:]])
            )(f),
            then=f"--task kto {ON}",
        ),
        fails("of another run: .*data|rows"),
    ),
    "rewards resumed": (after("reward", then=f"--task reward {ON}"), works(steps=4)),
    "rewards resumed as preferences": (
        after("reward", then=f"--task dpo {ON}"),
        fails("of another run|checkpoint-2"),
    ),
    "text from a finished model of rewards": (
        after(
            "reward", then="--task dpo --model_name_or_path FOLDER/run/final --output_dir FOLDER/b"
        ),
        works("final is a classifier or a model of rewards", steps=4),
    ),
    "rewards from a finished model of rewards": (
        after(
            "reward",
            then="--task reward --model_name_or_path FOLDER/run/final --output_dir FOLDER/b",
        ),
        works(steps=4),
    ),
    # disks
    **{
        f"{why} while a reference is written": (
            task("dpo", FRESH),
            fails(f"{why}.*--cache_dir"),
            always(IN_THE_PASS, refuse(code)),
        )
        for why, code in (
            ("No space left", FULL),
            ("Disk quota exceeded", QUOTA),
            ("Read-only file system", READ_ONLY),
        )
    },
    # signals
    **{
        f"{name} {phase}": (task(of, FRESH), ends(status), at(moment, send(name)))
        for name, status in (("TERM", 143), ("INT", 130), ("HUP", 129))
        for of, phase, moment in (
            ("dpo", "while a reference is written", IN_THE_PASS),
            ("dpo", "while a reference computes", SCORING),
            ("dpo", "while pairs are tokenised", file_event("open", "*/fresh/tokens-*")),
            ("kto", "while ratings are packed", file_event("open", "*/fresh/rows-*")),
            (
                "distill",
                "while a teacher is loaded",
                before("longctx.train.start.teacher.load_model"),
            ),
        )
    },
    "TERM in step 2 of dpo": (
        task("dpo", "--max_steps 4"),
        ends(143, "continue with --resume_from_checkpoint last"),
        at(step(2), send("TERM")),
    ),
    "INT in step 1 of rewards": (
        task("reward", "--max_steps 4"),
        ends(130, "continue with --resume_from_checkpoint last"),
        at(step(1), send("INT")),
    ),
}

CASES = table("tasks", {**OPTIONS, **LOSSES, **ELSEWHERE, **DATA, **MODELS, **CACHE})
