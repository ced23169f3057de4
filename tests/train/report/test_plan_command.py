"""`longctx plan`: what it prints, its page and numbers, and one line for what is wrong."""

from __future__ import annotations

import json
import os
import re

import pytest
from paths import ROOT
from rich.console import Console

from longctx.errors import UserError
from longctx.train.engines.layout import FullyShard
from longctx.train.loading.config_sizes import SIZES
from longctx.train.plan.changes import FSDP2 as FSDP2_FLAGS
from longctx.train.report.plan import main
from longctx.train.report.plan_text import COLOURS, OTHER, figures, ways_out, wrapped
from longctx.train.start.options import parse_planned

FSDP2 = ["--fsdp", "true", "--fsdp_config", str(ROOT / "fsdp_configs/fsdp2.json")]
ZERO3 = ["--deepspeed", str(ROOT / "ds_configs/zero3.json")]
SHARED = ["--gpus", "2", "--sequence_parallel_size", "2"]
PEER = ["--class_type", "liger"]
MODEL = ["--preset", "llama-3.2-1b", "--gpu", "rtx-4090", "--host_memory_gib", "64"]


def result(capsys, *words: str) -> dict:
    main([*MODEL, "--json", *words])
    return json.loads(capsys.readouterr().out)


def test_a_run_that_fits(capsys) -> None:
    found = result(capsys, "--seq_len", "32768", "--data_tokens", "1e9")
    assert found["fits"] and found["problem"] is None and "changes" not in found
    assert found["step_s"] == pytest.approx(sum(found["parts_s"].values()), rel=0.005)
    assert found["tokens_per_s"] == pytest.approx(32768 / found["step_s"], rel=1e-3)
    assert found["days"] == pytest.approx(1e9 / found["tokens_per_s"] / 86400, rel=1e-3)
    phases = found["phases"]
    assert [p["phase"] for p in phases] == ["forward", "loss", "backward", "embedding", "update"]
    assert max(p["gib"] for p in phases) == found["gpu_gib"] <= found["gpu_limit_gib"]
    for phase in phases:
        assert sum(phase["buffers"].values()) == pytest.approx(phase["gib"], abs=0.02)
    assert result(capsys, "--seq_len", "32768", "--max_steps", "10")["data_tokens"] == 327680


def test_seconds_that_nobody_measured_are_a_range(capsys) -> None:
    """4090 here, and a card by its numbers, whose range is wider; an H100 was measured."""
    words = ["--seq_len", "32768", "--data_tokens", "1e9"]
    found = result(capsys, *words)
    assert found["step_s_low"] == pytest.approx(0.8 * found["step_s"])
    assert found["step_s_high"] == pytest.approx(1.4 * found["step_s"])
    assert found["tokens_per_s_low"] == pytest.approx(found["tokens_per_s"] / 1.4, rel=1e-3)
    own = result(capsys, *words, "--gpu", "gib=23.5,flops=165e12")
    assert own["assumed"] == "assumed: bandwidth=1100e9, link=31.5e9"
    assert own["step_s_high"] == pytest.approx(1.5 * own["step_s"])
    measured = result(capsys, *words, "--gpu", "h100")
    assert measured["step_s_low"] == measured["step_s"] == measured["step_s_high"]
    said = [figures(each) for each in (found, own, measured)]
    ranges = ["a step", "tokens/s", "with less", "days"]
    assert [name for name, text in said[0] if " to " in text] == ranges
    for (_, text), why in zip(
        (lines[1] for lines in said),
        ("by the datasheet; not measured on this card)", "link=31.5e9)", "(rates measured)"),
        strict=True,
    ):
        assert text.endswith(why) and (" to " in text) == (why != "(rates measured)")


def test_adapters(capsys, monkeypatch) -> None:
    """Without PEFT and bitsandbytes: the machine that is planned for has them."""
    for module in (
        "longctx.train.lora.quantise",
        "longctx.train.lora.peft_adapters",
        "longctx.train.plan.subject",
    ):
        monkeypatch.setattr(f"{module}.installed", lambda name: False)
    words = ["--seq_len", "32768", "--lora_r", "16"]
    whole, lora = result(capsys, *words[:2]), result(capsys, *words)
    qlora = result(capsys, *words, "--quantize", "nf4", "--lora_dropout", "0.1")
    assert whole["step_s"] > lora["step_s"]
    peaks = [sum(phase["gib"] for phase in found["phases"]) for found in (lora, qlora)]
    assert peaks[0] > peaks[1]
    assert "fp32 adapters over frozen weights" in lora["states"]


def test_a_recipe_and_the_lengths_that_fit(capsys, tmp_path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("preset: llama-3.2-1b\nseq_len: 8192\nplace: host\n")
    main(["--config", str(recipe), "--gpu", "h100", "--host_memory_gib", "64", "--sweep", "--json"])
    swept = json.loads(capsys.readouterr().out)["sweep"]
    lengths = [row["seq_len"] for row in swept]
    assert lengths[:3] == [4096, 8192, 16384] and lengths == sorted(lengths)
    assert [row["step_s"] for row in swept] == sorted(row["step_s"] for row in swept)


def test_what_less_memory_costs(capsys) -> None:
    words = ["--preset", "llama-3.1-8b", "--seq_len", "8192", "--lora_r", "16", "--gpu", "h100"]
    main([*words, "--quantize", "nf4", "--json"])
    found = json.loads(capsys.readouterr().out)
    less = found["less_memory"]
    rows = [(row["gpu_memory_gib"], row["step_s"]) for row in reversed(less)]
    assert len(less) == 4 and rows == sorted(rows, key=lambda row: (row[0], -row[1]))
    assert all(row["gpu_gib"] <= row["gpu_memory_gib"] < found["gpu_gib"] for row in less)
    assert found["step_s"] < less[0]["step_s"] < less[-1]["step_s"]
    first = f"{less[0]['step_s']:.3g} s in {less[0]['gpu_memory_gib']:g} GiB, "
    assert dict(figures(found))["with less"].startswith(first)


def test_a_run_that_does_not_fit_ends_with_1_and_says_what_would(capsys, tmp_path) -> None:
    page = tmp_path / "plan.html"
    words = ["--seq_len", "131072", "--offload_activations", "none", "--keep", "all"]
    with pytest.raises(SystemExit) as ended:
        main([*MODEL, *words, "--html", str(page)])
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert "no: GPU memory is short by" in said and "--gpu_memory_gib" not in said
    order = [
        "fits",
        "a step  ",
        "host memory",
        "GPU memory at its peak",
        "\nstates",
        "It fits with",
    ]
    assert [*sorted(order, key=said.index)] == order
    assert said.index("It fits with") < said.index("--keep auto")
    with pytest.raises(SystemExit):
        main([*MODEL, *words, "--json"])
    found = json.loads(capsys.readouterr().out)
    lacks = found["shortage"]
    assert lacks["memory"] == "GPU" and lacks["needed_gib"] > lacks["available_gib"]
    assert sum(lacks["holds"].values()) == pytest.approx(lacks["needed_gib"], abs=0.6)
    assert not found["fits"] and found["problem"].startswith("GPU memory is short by ")
    text = page.read_text()
    assert text.count("<svg") == 2 and "Every large buffer" in text and "--keep auto" in text


def test_ways_out_are_whole_in_any_terminal(capsys) -> None:
    """The flags are what a user copies: none is cut off, parted from its value or left out."""
    words = ["--preset", "llama-3.1-8b", "--gpu", "rtx-4090", "--host_memory_gib", "64"]
    with pytest.raises(SystemExit):
        main([*words, "--seq_len", "131072", "--json"])
    result = json.loads(capsys.readouterr().out)
    ways = [row["flags"] for row in result["changes"]]
    assert "--lora_r 16 --quantize nf4" in ways
    for columns in (20, 40, 60, 80, 100):
        console = Console(width=columns)
        console.print(ways_out(result, console))
        lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        assert not any("…" in line for line in lines) and any("GiB" in line for line in lines)
        for way in ways:
            for option in re.split(r" (?=--)", way):
                assert columns < 60 or any(option in line for line in lines), (option, lines)
                assert option in " ".join(lines)
            assert columns < 80 or any(line.startswith(f"{way} ") for line in lines)


def test_lines_end_where_a_part_of_them_ends() -> None:
    text = "on the host: weights 9.92, states 74.79 GiB (all); layers 1 to 9: x o h q k v"
    assert wrapped(text, 40).splitlines() == [
        *("on the host: weights 9.92,", "states 74.79 GiB (all);", "layers 1 to 9: x o h q k v"),
    ]
    assert wrapped(text, 100) == text
    assert wrapped("a part of many words", 8).splitlines() == ["a part", "of many", "words"]


def test_a_group_in_a_bar_has_its_own_letter_and_colour() -> None:
    letters, colours = zip(*COLOURS.values(), OTHER, strict=True)
    assert len({*letters}) == len({*colours}) == len(letters)


def test_gpus_that_share_rows_are_what_the_way_out_planned() -> None:
    """`--gpus 2 --fsdp ...` is told to a user, and FullyShard(processes=2) was planned."""
    engine = parse_planned([*MODEL[:2], *FSDP2_FLAGS.split()])[3]
    assert engine.layout(2, 1) == FullyShard(processes=2)


@pytest.mark.parametrize("colours", [False, True])
def test_what_is_printed_is_no_wider_than_its_terminal(capsys, monkeypatch, colours) -> None:
    """Without colours a bar is made of letters. Its parts are as long as their share."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    if colours:
        monkeypatch.setenv("FORCE_COLOR", "1")
    main([*MODEL, "--seq_len", "32768", *([] if colours else ["--sweep"])])
    said = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, said)) <= 80
    i = next(i for i, line in enumerate(said) if line.startswith("GPU memory at its peak"))
    bar, legend = said[i + 1], " ".join(said[i + 2 : i + 4])
    assert len(bar) == 80 and ("█" in bar) == colours
    if not colours:
        limit = float(re.findall(r"of ([\d.]+) GiB", said[i])[0])
        for letter, gib in re.findall(r"([wgsalh.]) [a-zA-Z_' ]+ ([\d.]+)", legend):
            assert bar.count(letter) == pytest.approx(80 * float(gib) / limit, abs=1.5)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpu", "h10"], "--gpu h10: no such machine is known; did you mean h100"),
        (["--gpu_memory_gib", "32"], "--gpu_memory_gib 32 is more than the 23.5 GiB of rtx-4090"),
        (["--dtype", "float32"], "knows runs in bfloat16, and this one is in float32"),
        (
            ["--deepspeed", str(ROOT / "ds_configs/zero3_nvme.json")],
            "--deepspeed: offload to nvme is not known to the plan: cpu, or none",
        ),
        (["--deepspeed", "nowhere.json"], "nowhere.json"),
        ([*FSDP2, "--place", "host"], "--place: fsdp keeps fp32 states itself"),
        ([*FSDP2, "--bf16", "false"], "knows engines in bfloat16"),
        ([*FSDP2, "--lora_r", "8", "--quantize", "nf4"], "nf4 is for runs without an engine"),
        ([*FSDP2, "--gpus", "3", "--sequence_parallel_size", "2"], "does not divide the 3 proc"),
        ([*FSDP2, "--gpus", "5", "--sequence_parallel_size", "5"], "5 ranks cannot share a head"),
        (["--gpus", "2", "--sequence_parallel_size", "2"], "need an engine that shards weights"),
        ([*FSDP2, "--optim", "adafactor"], "the plan knows AdamW under engines, not --optim"),
        ([*FSDP2, *SHARED, "--class_type", "liger"], "cannot share rows with FSDP"),
        ([*ZERO3, *SHARED, *PEER, "--attn_backend", "fa4"], "does not take flash_attention_4"),
        (["--gpus", "0"], "--gpus: invalid number value: '0'"),
        (["--gpus", "2", "--optimizer_states", "as_weights"], "without an engine with exact"),
        (
            ["--class_type", "vanilla", "--gradient_checkpointing", "false"],
            "--class_type vanilla with checkpointing by layer",
        ),
        (
            ["--class_type", "vanilla", "--offload_activations", "all"],
            "--class_type vanilla with checkpoints on the GPU: leave out --offload_activations",
        ),
        (
            ["--parts", "rope", "--gradient_checkpointing", "false"],
            "longctx plan knows --parts with checkpointing by layer",
        ),
        (["--parts", "geglu"], "--parts: geglu is not for models of 'llama': its MLP is of swiglu"),
        (["--place", "host", "--optimizer_states", "as_weights"], "--place host and --save_fp32"),
        (["--data_tokens", "many"], "--data_tokens: invalid number value: 'many'"),
        (["--seqlen", "8192"], "unknown option --seqlen; did you mean --seq_len"),
        (["--attn_backend", "fa4"], "--attn_backend fa4 is not known on rtx-4090"),
        (["--seq_len", "262144"], "--seq_len 262144 is above the model's"),
        (["--quantize", "nf4"], "give --lora_r"),
        (["--lora_r", "8", "--lora_targets", "q_pro"], "did you mean q_proj"),
        (["--plan", "plan.json"], "--plan is longctx train's, which runs what --json writes here"),
    ],
)
def test_what_is_wrong_is_one_line(words, says) -> None:
    with pytest.raises(UserError) as error:
        main([*MODEL, *words])
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--head_groups", "-1"], "--head_groups must be at least 1"),
        (["--tile_tokens", "0"], "--tile_tokens must be at least 1"),
        (["--gpus", "1e9"], "and 1024 GPUs: lower"),
        (["--gradient_accumulation_steps", "2147483647"], "1048576 rows a step"),
        (["--per_device_train_batch_size", "2147483647"], "1048576 rows a step"),
    ],
)
def test_what_is_too_large_is_refused_at_once(words, says) -> None:
    with pytest.raises(UserError, match=says):
        main([*MODEL, *words])


LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 99}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 4096}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, value)
            for name in SIZES
            for value in (0, -1, 10**15, "4", True, 1.5, float("nan"))
        ),
        ("num_hidden_layers", 9999),
        ("num_hidden_layers", 10**400),
    ],
)
def test_odd_sizes_in_a_config(family, name, value, tmp_path) -> None:
    """Where transformers makes a list of so many layers while it reads, too."""
    config = LLAMA | {"model_type": family, name: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as error:
        main(["--model_name_or_path", str(tmp_path), "--gpu", "h100", "--host_memory_gib", "8"])
    assert "config.json" in str(error.value) and "\n" not in str(error.value)


def test_a_config_without_end(tmp_path) -> None:
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", 1 << 36)
    with pytest.raises(UserError, match="config.json has 65536 MiB"):
        main(["--model_name_or_path", str(tmp_path), "--gpu", "h100"])


@pytest.mark.parametrize(
    "name", ["recipe.yaml", "config.json", "model.safetensors", "link.html", "pipe", "note.html"]
)
def test_the_page_overwrites_nothing(name, tmp_path) -> None:
    recipe = tmp_path / "recipe.yaml"
    for other in ("recipe.yaml", "config.json", "model.safetensors", "note.html"):
        (tmp_path / other).write_text("preset: tiny\n")
    (tmp_path / "link.html").symlink_to(recipe)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=f"cannot write .*{name}"):
        main(["--config", str(recipe), "--gpu", "h100", "--html", str(tmp_path / name)])
    assert recipe.read_text() == (tmp_path / "config.json").read_text() == "preset: tiny\n"


def test_an_engine_on_several_gpus(capsys, tmp_path) -> None:
    page = tmp_path / "plan.html"
    words = ["--preset", "llama-3.2-1b", "--seq_len", "32768", "--gpu", "h100"]
    words += ["--host_memory_gib", "256"]
    main([*words, *FSDP2, "--gpus", "2", "--html", str(page)])
    said = capsys.readouterr().out
    assert "under FSDP2" in said and "2 x h100" in said
    assert "under FSDP2" in (text := page.read_text()) and "gathered weights" in text
    main([*words, *FSDP2, "--gpus", "2", "--json"])
    two = json.loads(capsys.readouterr().out)
    assert (two["engine"], two["gpus"]) == ("FSDP2", 2) and "plan" not in two
    assert two["tokens_per_s"] == pytest.approx(2 * 32768 / two["step_s"], rel=1e-3)
    main([*words, *FSDP2, "--gpus", "4", "--sequence_parallel_size", "2", "--json", "--sweep"])
    four = json.loads(capsys.readouterr().out)
    assert four["gpu_gib"] < two["gpu_gib"] and len(four["sweep"]) > 2
    found = []
    for kind in (PEER, ["--class_type", "custom", "--offload_activations", "none"]):
        main([*words, *ZERO3, *SHARED, *kind, "--json"])
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["step_s"] > found[1]["step_s"] > 0.6 * found[0]["step_s"]


def test_a_model_and_a_machine_have_names(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="name the model to plan for"):
        main(["--gpu", "h100"])
    with pytest.raises(UserError, match=r"no GPU: name the one to plan for with --gpu \(h100"):
        main(["--preset", "llama-3.2-1b"])


def test_any_model_is_planned_for_its_memory(capsys) -> None:
    """Beside vanilla: no logits, and x of each layer but the last on the host if asked for."""
    words = ["--seq_len", "16384", "--gpu", "h100", "--lora_r", "8"]
    vanilla = result(capsys, *words, "--class_type", "vanilla")
    ours = result(capsys, *words, "--class_type", "any", "--offload_activations", "none")
    hosted = result(capsys, *words, "--class_type", "any", "--offload_activations", "all")
    assert vanilla["gpu_gib"] - ours["gpu_gib"] > 12 * 16384 * 128256 / 2**30 * 0.8
    assert hosted["gpu_gib"] < ours["gpu_gib"] and ours["host_locked_gib"] == 0
    assert hosted["host_locked_gib"] == pytest.approx(15 * 16384 * 2048 * 2 / 2**30, rel=0.01)
    assert dict(figures(hosted))["promised"].startswith("memory, not speed")
