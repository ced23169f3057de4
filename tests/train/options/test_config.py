"""Options: flags and recipes are strict, flags win, and errors name the closest valid name."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hostile.cases import Case
from hostile.files import with_words
from hostile.tables import CASES
from paths import ROOT
from transformers import TrainingArguments

from longctx.errors import UserError
from longctx.patching.patch import OPTIONS as PATCH_OPTIONS
from longctx.train.options.arguments import OPTIONS
from longctx.train.options.config import DataArguments, ModelArguments, TrainArguments, parse_flags
from longctx.train.options.limits import NOT_OURS
from longctx.train.start.options import parse_args

CPU = ["--preset", "tiny", "--use_cpu"]


def test_flags_win_over_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("preset: tiny\nseq_len: 512\nbf16: true\nadam_beta2: 0.95\n")
    model, _, train, _ = parse_args(["--config", str(recipe), "--seq_len", "1024", "--use_cpu"])
    assert (model.preset, model.seq_len) == ("tiny", 1024)
    assert train.adam_beta2 == 0.95
    assert train.bf16 and model.dtype == "float32"  # 16-bit compute over fp32 weights
    with pytest.raises(UserError, match="drop one of the two"):
        parse_args(["--config", str(recipe), "--dtype", "bfloat16", "--use_cpu"])


def test_one_process_uses_one_gpu(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    begin = TrainingArguments.__post_init__
    monkeypatch.setattr(
        TrainingArguments, "__post_init__", lambda self: (begin(self), setattr(self, "_n_gpu", 2))
    )
    _, _, args, engine = parse_args(["--use_cpu"])
    engine.start(args)
    assert args.n_gpu == 1
    assert "accelerate launch --num_processes 2" in capsys.readouterr().out


def test_recipe_lists_and_dicts(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "train_file: [a.txt, 'b c.txt']\nlr_scheduler_type: cosine\n"
        "lr_scheduler_kwargs: {num_cycles: 2}\nmax_steps: null\n"
    )
    _, data, train, _ = parse_args(["--config", str(recipe)])
    assert data.train_file == ["a.txt", "b c.txt"]
    assert train.lr_scheduler_kwargs == {"num_cycles": 2}
    assert train.max_steps == -1


QUICK = ("", "--use_cpu", "--seq-len=64", "--place host --host_memory_gib 2 --disable_tqdm true")
OF_A_MODEL = (
    "--preset tiny",
    "--model_name_or_path=m --train_file a.txt",
    "--model-name-or-path m --output_dir runs/books",
)
OF_NO_MODEL = (
    "--output_dir runs/books",
    "--output-dir=runs/books --max_steps 4",
    "--train_file a.txt --output_dir runs/books",
    "--dataset_name d",
    "--learning_rate 1e-5",
    "--overwrite_output_dir",
    "--resume_from_checkpoint last",
    "--seq_len 64 --lora_r 8",
    "--task dpo",
    "--tokenizer_name t",
    "--config RECIPE --output_dir runs/books",
)


@pytest.mark.parametrize("words", [*QUICK, *OF_A_MODEL, *OF_NO_MODEL])
def test_the_quick_start_serves_only_who_names_nothing_else(tmp_path: Path, capsys, words) -> None:
    """A lost end of a line leaves a command without its model: it must train nothing else."""
    (tmp_path / "quick.yaml").write_text("preset: tiny\nmax_steps: 7\noverwrite_output_dir: true\n")
    (tmp_path / "mine.yaml").write_text("seq_len: 64\n")
    flags = words.replace("RECIPE", str(tmp_path / "mine.yaml")).split()
    if words in OF_NO_MODEL:
        with pytest.raises(UserError, match="^no model was named: give --model_name_or_path"):
            parse_flags(flags, default_recipe=tmp_path / "quick.yaml")
        return
    found = parse_flags(flags, default_recipe=tmp_path / "quick.yaml")
    expected = (7, True) if words in QUICK else (found.max_steps, False)
    assert (found.max_steps, found.overwrite_output_dir) == expected
    said = "quick start: no model was named, so the preset tiny"
    assert (said in capsys.readouterr().out) == (words in QUICK)


@pytest.mark.parametrize(
    ("words", "recipe", "overwrites"),
    [
        ("", "output_dir: a\noverwrite_output_dir: true\n", True),
        ("--seq_len 64", "output_dir: a\noverwrite_output_dir: true\n", True),
        ("--output_dir b", "output_dir: a\noverwrite_output_dir: true\n", False),
        ("--output-dir=b", "output_dir: a\noverwrite_output_dir: true\n", False),
        ("--output_dir b --overwrite_output_dir", "output_dir: a\n", True),
        ("--output_dir b", "overwrite_output_dir: true\n", True),
    ],
)
def test_a_recipe_overwrites_only_its_own_folder(tmp_path: Path, words, recipe, overwrites) -> None:
    (tmp_path / "r.yaml").write_text(recipe)
    found = parse_flags(["--config", str(tmp_path / "r.yaml"), *words.split()])
    assert found.overwrite_output_dir is overwrites


SMALL_RUN = (
    "--model_name_or_path BASE/model --train_file BASE/data --use_cpu true --seq_len 64 "
    "--learning_rate 0.003 --max_steps 2 --save_steps 2 --output_dir FOLDER/run"
).split()


def refused() -> list[Case]:
    """The flags and recipes that the hostile suite refuses, one for each rule. NaN and infinity are
    a rule each, whatever the option, and so is each message about a recipe; each option has a range
    of its own, and all values outside of it are tried."""
    chosen: dict[tuple[str, str], Case] = {}
    for case in CASES:
        if case.of_options and not case.expected.later:
            rule = case.expected.says if case.table == "recipes" else case.name
            if number := re.search(r"\b(?:nan|inf)\b", case.name):
                rule = number[0]
            chosen.setdefault((case.table, rule), case)
    return [*chosen.values()]


@pytest.mark.parametrize("case", refused(), ids=lambda case: case.id)
def test_options_that_the_hostile_suite_refuses(case: Case, tmp_path: Path) -> None:
    """Without the run that each would begin."""
    folder, base = tmp_path / "case", tmp_path / "base"
    folder.mkdir()
    base.mkdir()
    words = with_words(SMALL_RUN, case.make(folder))
    words = [w.replace("FOLDER", str(folder)).replace("BASE", str(base)) for w in words]
    with pytest.raises(UserError) as error:
        parse_args(words)
    assert re.search(case.expected.says, str(error.value))


def test_what_transformers_offers_and_a_run_refuses() -> None:
    """Through the dataclass, as the flags of some are words and of others yes or no."""
    for option in NOT_OURS:
        default = TrainArguments.__dataclass_fields__[option].default
        value = ["x"] if option.startswith("inc") else not default
        with pytest.raises(UserError, match=f"--{option} .*(leave it out|use|uploads|examines)"):
            TrainArguments(use_cpu=True, **{option: value})


EVAL = "--eval_file e.txt --eval_strategy steps "


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--seq 8", "unknown option --seq; did you mean --seq_len"),  # no abbreviations
        ("--streaming --train_file a", "--streaming reads a --dataset_name"),
        ("--dataset_name d --streaming", "--max_steps"),
        ("--ddp_backend gloo", "accelerate launch"),
        ("--load_best_model_at_end --save_strategy no --eval_file e.txt", "--eval_strategy"),
        (EVAL + "--metric_for_best_model accuracy", "must be loss"),
        ("--max_grad_norm 1e-300", "clips gradients to nothing"),
        ("--dataloader_multiprocessing_context spawn", "need workers"),
        ("--debug tpu_metrics_debug", "needs a TPU"),
        ('--gradient_checkpointing_kwargs {"bad":1}', "takes debug, determinism_check"),
        ('--accelerator_config {"gradient_accumulation_kwargs":{"num_steps":3}}', "steps are"),
        ('--accelerator_config {"gradient_accumulation_kwargs":3}', "gradient_accumulation_kwargs"),
        ("--accelerator_config gone.json", "cannot read gone.json"),
        ("--lr_scheduler_kwargs gone.json", "not JSON"),
        ("--report_to codecarbon", "--report_to codecarbon is not installed: pip"),
        ("--report_to tensorbord", "--report_to tensorbord: did you mean tensorboard?"),
        ("--train_file a.txt \udcff", "--train_file .*udcff' is not UTF-8"),
        ("--fsdp word", "--fsdp: word is no word of FSDP2"),
        (
            '--fsdp true --fsdp_config {"version":"x"}',
            "FSDPx is not supported: set fsdp_version to 2",
        ),
        ('--deepspeed {"zero_optimization":3}', "cannot be used: 'int' object has no attribute"),
        # What transformers would say when training begins
        ("--optim adamw_torch_xla", "--optim adamw_torch_xla cannot be used: "),
        ("--optim lomo", "inside backward"),
        ("--lora_r 4 --loraplus_lr_ratio 4 --optim apollo_adamw", "leave out one of them"),
        (
            "--class_type vanilla --offload_activations all --gradient_checkpointing false",
            "leave out --gradient_checkpointing false",
        ),
        ("--optim galore_adamw_layerwise", "inside backward"),
        ("--optim_args momentum=0.9", "momentum=0.9 changes nothing of --optim adamw_torch_fused"),
        ("--optim sgd --optim_args momentum=0.9,nestrov=1", "nestrov=1 changes nothing"),
        ("--optim sgd --optim_args nesterov=true", "Nesterov momentum requires"),
        ("--lr_scheduler_type warmup_stable_decay", "missing 1 required .* 'num_decay_steps'"),
        (
            '--lr_scheduler_type cosine --lr_scheduler_kwargs {"num_cycles":NaN}',
            "learning rate stays 0 for",
        ),
        ('--lr_scheduler_type polynomial --lr_scheduler_kwargs {"power":-1}', "negative power"),
        ('--lr_scheduler_type cosine --lr_scheduler_kwargs {"num_cycles":1e400}', "cannot be used"),
        ('--lr_scheduler_type inverse_sqrt --lr_scheduler_kwargs {"timescale":0}', "by zero"),
        ("--max_steps 1 --warmup_steps 1", "the learning rate stays 0 for 1 step"),
        ("--parts rms_nrom", "--parts has no part 'rms_nrom'; did you mean rms_norm?"),
        ("--class_type vanilla --parts rope", "--parts is for --class_type custom and liger"),
        ("--class_type liger --parts cross_entropy fused_linear_cross_entropy", "give one"),
        ("--parts schedule rope", "'schedule' has all parts and stands alone"),
        ("--parts rope --task dpo", "--task dpo needs the schedule .*: leave out --parts"),
        ("--parts rope --label_smoothing_factor 0.1", "not among --parts: add fused_linear_"),
    ],
)
def test_what_cannot_be_together(flags: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse_args([*CPU, *flags.split(" ")])
    assert "\n" not in str(error.value)


def test_options_of_the_schedule_are_heard_or_said_in_other_class_types() -> None:
    """parts and attn_backend are checked by class type, and offload_activations is offloaded
    checkpoints."""
    model = ModelArguments(preset="tiny", class_type="vanilla", offload_activations="none")
    rest = SimpleNamespace(place="gpu")
    silent = [
        name
        for name in PATCH_OPTIONS
        if all(need.is_met(model, None, rest) for need in OPTIONS[name].needs)
    ]
    assert silent == ["parts", "offload_activations", "attn_backend"]


@pytest.mark.parametrize(
    ("flags", "idle"),
    [
        ("--class_type vanilla --head_groups 2 --keep x", "--class_type custom"),
        ("--class_type vanilla --gradient_checkpointing false", None),
        ("--gradient_checkpointing false", "--class_type vanilla or liger"),
        ("--class_type vanilla --offload_activations none", None),
        ("--class_type vanilla --offload_activations all", None),
        ("--parts rope --gradient_checkpointing false", None),
        ("--parts rope --keep x", "--class_type custom without --parts"),
        ("--parts schedule --keep x", None),
        (
            "--offload_activations none --place gpu --host_memory_gib 3",
            "--place auto or host, or --class_type custom or any with --offload_activations auto "
            "or all",
        ),
        ("--class_type vanilla --host_memory_gib 3", None),
        ("--class_type vanilla --place gpu --host_memory_gib 3", "--place auto or host"),
        ("--dataset_split test", "--dataset_name"),
        ("--eval_steps 5", "--eval_strategy steps"),
        (EVAL + "--eval_steps 5", None),
        ("--save_strategy no --save_steps 5", "--save_strategy steps"),
        ("--greater_is_better true", "--load_best_model_at_end"),
        ("--run_name me", "--report_to"),
        ("--lr_scheduler_type constant --warmup_steps 5", "a --lr_scheduler_type with a warmup"),
        ("--lr_scheduler_type constant_with_warmup --warmup_steps 5", None),
        ("--optim sgd --adam_beta2 0.9", "an Adam"),
        ("--optim_target_modules all-linear", "a GaLore or APOLLO"),
        ("--ddp_bucket_cap_mb 3", "several processes"),
        ("", None),
    ],
)
def test_what_does_nothing_is_said_once(flags: str, idle: str | None, capsys) -> None:
    parse_args([*CPU, *flags.split()])
    said = [
        line for line in capsys.readouterr().out.splitlines() if "the option has no effect" in line
    ]
    assert len(said) == (idle is not None)
    assert idle is None or f"needs {idle}" in said[0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [("", False), ("--eval_share 0.5", True), (EVAL, False)],
)
def test_an_evaluation_without_a_strategy_is_said_to_run_once(flags, said, capsys) -> None:
    parse_args([*CPU, *flags.split()])
    assert ("evaluation runs once, when training is over" in capsys.readouterr().out) == said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("streaming: maybe", "--streaming: true or false is expected, got 'maybe'"),
        ("include_num_input_tokens_seen: some", "all, non_padding, true or false is expected"),
        ("eval_strategy: true", "--eval_strategy: invalid choice: 'true'"),
        ("train_file: [a, &x b, *x]", "r.yaml: line 1 has an alias, which recipes do not: write"),
        ("lr_scheduler_kwargs: {a: 1, a: 2}", "r.yaml: line 1 has a for the second time"),
        ("datasets:\n- path: a\n  type: b", "r.yaml: unknown key 'datasets': write --train_file"),
        ("plugins: []", "r.yaml: unknown key 'plugins'"),
        ("train_file: [{path: a}]", "--train_file: takes a list of words, found settings in it"),
        ("train_file: []", "--train_file: takes a list of words, found an empty one"),
        ("lr_scheduler_kwargs: {a: !!python/name:os.system x}", "--lr_scheduler_kwargs: the tag"),
        ("train_file: !mine [a]", "--train_file: the tag '!mine' cannot be used"),
    ],
)
def test_bad_recipes_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(text)
    with pytest.raises(UserError) as error:
        parse_args(["--config", str(recipe)])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "option", "means"),
    [
        ("save_strategy: no", "save_strategy", "no"),
        ("save_strategy: off", "save_strategy", "no"),
        ("save_strategy: false", "save_strategy", "no"),
        ("eval_strategy: off", "eval_strategy", "no"),
        ("report_to: no", "report_to", []),
        ("report_to: none", "report_to", []),
        (
            "include_num_input_tokens_seen: non_padding",
            "include_num_input_tokens_seen",
            "non_padding",
        ),
        ("include_num_input_tokens_seen: yes", "include_num_input_tokens_seen", "all"),
        ("include_num_input_tokens_seen: no", "include_num_input_tokens_seen", "no"),
        ("report_to: [tensorboard]", "report_to", ["tensorboard"]),
        ("resume_from_checkpoint: no", "resume_from_checkpoint", None),
        ("deepspeed: off", "deepspeed", None),
        ("bf16: yes", "bf16", True),
        ("bf16: on", "bf16", True),
        ("bf16: off", "bf16", False),
        ("learning_rate: 1e-4", "learning_rate", 1e-4),
        ("learning_rate: 1E-4", "learning_rate", 1e-4),
        ("max_steps: 010", "max_steps", 10),
        ("max_steps: 1_000", "max_steps", 1000),
        ("max_steps: '7'", "max_steps", 7),
        ("max_steps: ~", "max_steps", -1),
        ("max_steps:", "max_steps", -1),
        ("output_dir: 1.10", "output_dir", "1.10"),
        ("output_dir: 2020-01-01", "output_dir", "2020-01-01"),
        ("output_dir: --x", "output_dir", "--x"),
        ("output_dir: 'null'", "output_dir", "null"),
        (
            "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-5}",
            "lr_scheduler_kwargs",
            {"min_lr": 1e-5},
        ),
    ],
)
def test_recipes_mean_what_is_written(tmp_path: Path, text: str, option: str, means) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(text)
    assert getattr(parse_args(["--config", str(recipe), *CPU])[2], option) == means


KINDS_OF_FILES = {
    "/dev/zero": "is not a regular file",
    "/dev/stdin": "is not a regular file|cannot read",
    "FOLDER": "is not a regular file",
    "FOLDER/fifo": "is not a regular file",
    "FOLDER/none": "No such file",
    "FOLDER/large": "is a file of 2 MiB",
    "FOLDER/bytes": "is not UTF-8 text",
}


@pytest.mark.parametrize(
    ("option", "kind", "message"),
    [
        *(("config", *rule) for rule in KINDS_OF_FILES.items()),
        *(
            (option, "/dev/zero", "is not a regular file")
            for option in ("deepspeed", "fsdp_config", "accelerator_config")
        ),
    ],
)
def test_files_of_options_are_small_and_end(tmp_path, option, kind, message) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_text(" " * 2**21)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=message):
        parse_args([*CPU, f"--{option}", kind.replace("FOLDER", str(tmp_path))])


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_published_recipes_name_valid_options_and_files(recipe: Path) -> None:
    options = yaml.safe_load(recipe.read_text())
    classes = (ModelArguments, DataArguments, TrainArguments)
    assert options.keys() <= {field.name for c in classes for field in dataclasses.fields(c)}
    named = re.findall(r"(?:recipes|ds_configs|fsdp_configs)/[\w.-]+", recipe.read_text())
    assert all((ROOT / path).is_file() for path in named)
