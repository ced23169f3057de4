"""`longctx eval`: loss by position and needles, against what can be computed by hand."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from small_run import prepare, run
from small_tokenizer import small_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from longctx.errors import UserError
from longctx.train.cli import main
from longctx.train.report import evaluate
from longctx.train.report.evaluate import cut_windows, find_needles, loss_by_position, token_losses
from longctx.train.report.needle import DEPTHS, needles

pytestmark = pytest.mark.usefixtures("reference_kernels")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    prepare(folder)
    return folder


@pytest.fixture
def model(small: Path):
    return AutoModelForCausalLM.from_pretrained(small / "model").eval()


def test_token_losses_are_those_of_the_whole_logits(model, monkeypatch) -> None:
    monkeypatch.setattr(evaluate, "LOGIT_TOKENS", 7)
    ids = torch.randint(0, 300, (1, 50))
    logits = model(ids).logits[0, :-1]
    truth = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    torch.testing.assert_close(token_losses(model, ids), truth)


def test_buckets_cover_every_predicted_token_once(model) -> None:
    texts = [np.arange(i, i + 256) % 300 for i in range(3)]
    lines = loss_by_position(model, texts, CPU)
    assert [(line["start"], line["end"]) for line in lines] == [
        (0, 16),
        (16, 64),
        (64, 128),
        (128, 256),
    ]
    sizes = [15, 48, 64, 128]
    whole = torch.stack([token_losses(model, torch.tensor(text)[None]) for text in texts])
    mean = sum(line["loss"] * size for line, size in zip(lines, sizes, strict=True)) / sum(sizes)
    assert mean == pytest.approx(float(whole.mean()), rel=1e-5)
    assert lines[1]["loss"] == pytest.approx(float(whole[:, 15:63].mean()), rel=1e-5)
    spread = whole[:, 15:63].mean(1).std() / 3**0.5
    assert lines[1]["standard_error"] == pytest.approx(float(spread), rel=1e-4)


def test_needles_have_their_length_depth_and_answer() -> None:
    tokenizer = small_tokenizer()
    hay = np.full(2000, 299, dtype=np.int32)
    made = list(needles([hay], tokenizer, lengths=[1000, 2000], repeats=2))
    assert len(made) == 2 * 2 * len(DEPTHS)
    for needle in made:
        assert len(needle.input_ids) == needle.tokens
        text = tokenizer.decode(needle.input_ids.tolist())
        answer = tokenizer.decode(needle.input_ids[-needle.answer_tokens :].tolist())
        assert answer.strip().isdigit() and text.count(answer.strip()) == 2
        hidden = np.flatnonzero(needle.input_ids != 299)[0]
        assert hidden == pytest.approx(needle.depth * needle.tokens, abs=0.15 * needle.tokens)
    again = list(needles([hay], tokenizer, lengths=[1000, 2000], repeats=2))
    assert all((a.input_ids == b.input_ids).all() for a, b in zip(made, again, strict=True))


def test_a_needle_is_found_by_a_model_that_repeats_it(monkeypatch) -> None:
    """Models that see the whole input and answer right, or with one wrong digit."""
    tokenizer = small_tokenizer()
    hay = [np.full(300, 299, dtype=np.int32)]

    class Answers(torch.nn.Module):
        def __init__(self, wrong: bool) -> None:
            super().__init__()
            self.wrong = wrong

        def get_output_embeddings(self):
            return lambda hidden: torch.nn.functional.one_hot(hidden.long(), 400).float()

    def hidden(model, input_ids):
        following = input_ids.roll(-1, 1)
        if model.wrong:
            following[0, -2] += 1
        return following

    monkeypatch.setattr(evaluate, "_hidden", hidden)
    for wrong in (False, True):
        lines = find_needles(Answers(wrong), tokenizer, hay, [300], 3, CPU)
        assert [line["found"] for line in lines] == [float(not wrong)] * len(DEPTHS)
        assert all(line["tries"] == 3 for line in lines)


def test_windows_take_turns_between_documents(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("a " * 900)
    (tmp_path / "b.txt").write_text("b " * 900)
    windows = cut_windows([str(tmp_path)], small_tokenizer(), 256, 3)
    words = [small_tokenizer().decode(window.tolist()) for window in windows]
    assert ["a" in text.replace("<|bos|>", "") for text in words] == [True, False, True]
    assert words[0].startswith("<|bos|>") and not words[2].startswith("<|bos|>")
    with pytest.raises(UserError, match=r"no document of .* has 9999 tokens \(the longest has"):
        cut_windows([str(tmp_path)], small_tokenizer(), 9999, 3)


def test_the_command_writes_results_and_a_picture(small, tmp_path, capsys) -> None:
    output, plot = tmp_path / "eval.json", tmp_path / "eval.png"
    book = tmp_path / "book.txt"
    book.write_text("".join((small / "data" / f"{i}.txt").read_text() for i in range(12)))
    flags = ["--eval_file", str(book), "--seq_len", "1024", "--windows", "2", "--repeats", "1"]
    for name in ("one", "two", "one"):
        main(["eval", str(small / "model"), *flags, "--name", name, "--output", str(output)])
    main(["eval", str(small / "model"), *flags, "--output", str(output), "--plot", str(plot)])
    assert [r["name"] for r in json.loads(output.read_text())] == [
        "two",
        "one",
        str(small / "model"),
    ]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "needles found at    512 tokens" in capsys.readouterr().out
    damages = ("[1]", '[{"name": "a", "needles": []}]', '{"name": "a"}', "{}", "[" * 100_000)
    for damaged in damages:
        output.write_text(damaged)
        with pytest.raises(SystemExit, match="error: .*holds no results of longctx eval"):
            main(["eval", str(small / "model"), *flags, "--output", str(output)])
    with pytest.raises(SystemExit, match="error: 64 tokens are too few for a needle"):
        main(["eval", str(small / "model"), "--eval_file", str(book), "--seq_len", "512"])
    with pytest.raises(SystemExit, match="error: --plot draws what --output holds"):
        main(["eval", str(small / "model"), *flags, "--plot", str(plot)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--output e.json --plot eval", "cannot write .*eval: name it .png"),
        ("--output e.json --plot eval.xyz", "cannot write .*eval.xyz: name it .png"),
        ("--output e.json --plot file/eval.png", "cannot write .*eval.png"),
        ("--output e.json --plot folder.png", "cannot write folder.png: it is no regular file"),
        ("--output e.json --plot book.svg", "book.svg would overwrite book.svg"),
        ("--output e.svg --plot e.svg", "e.svg would overwrite e.svg"),
        ("--output pipe", "cannot write pipe: it is no regular file"),
        ("--output file/e.json", "cannot write file/e.json"),
        ("--output old.json --plot e.png", "results that cannot be drawn"),
    ],
)
def test_what_could_not_be_written_ends_before_the_work(
    words: str, message: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("folder.png").mkdir()
    Path("book.svg").write_text("A sentence.")
    os.mkfifo("pipe")
    old = {"name": "old", "loss_by_position": [{"loss": 1.0}], "needles": [{"found": 1.0}]}
    Path("old.json").write_text(json.dumps([old]))
    before = Path("old.json").read_text()
    monkeypatch.setattr(evaluate, "evaluate", lambda *args: pytest.fail("the work has begun"))
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        main(["eval", "model", "--eval_file", "book.svg", *words.split()])
    assert Path("old.json").read_text() == before


def test_names_are_drawn_as_they_stand(tmp_path: Path) -> None:
    lines = [{"tokens": 64, "depth": depth, "found": 1.0} for depth in DEPTHS]
    buckets = [{"start": 0, "end": 64, "loss": 1.0}]
    drawn = evaluate.picture(
        [{"name": "$\\frac{ \ud800", "loss_by_position": buckets, "needles": lines}],
        tmp_path / "a.SVG",
    ).decode()
    assert drawn.count(r"$\frac{ \ud800") == 2  # the legend and the title


@pytest.mark.parametrize(
    ("tokens", "rope", "says"),
    [
        (1024, "default", []),
        (2048, "default", ["where its RoPE is extrapolated; --rope_scaling yarn stretches it"]),
        (2048, "yarn", ["with RoPE yarn"]),
    ],
)
def test_windows_beyond_the_models_positions_are_said(tokens, rope, says) -> None:
    result = {"seq_len": tokens, "positions": 1024, "rope": {"rope_type": rope}}
    beyond = "  beyond the 1024 positions of the model's config.json, "
    assert [*evaluate.beyond_positions(result)] == [beyond + line for line in says]


def test_evaluations_that_run_beside_each_other_share_a_file(
    small: Path, tmp_path: Path, monkeypatch
) -> None:
    output = tmp_path / "eval.json"
    book = tmp_path / "book.txt"
    book.write_text("".join((small / "data" / f"{i}.txt").read_text() for i in range(12)))
    flags = ["--eval_file", str(book), "--seq_len", "1024", "--windows", "1", "--repeats", "1"]
    command = ["eval", str(small / "model"), *flags, "--output", str(output), "--name"]
    work = evaluate.evaluate

    def overtaken(*args):
        monkeypatch.setattr(evaluate, "evaluate", work)
        main([*command, "faster"])
        return work(*args)

    monkeypatch.setattr(evaluate, "evaluate", overtaken)
    main([*command, "slower"])
    assert [r["name"] for r in json.loads(output.read_text())] == ["faster", "slower"]


def test_rope_scaling_trains_saves_and_loads(small, tmp_path) -> None:
    """A model of 512 positions is trained on rows of 1024 with YaRN at factor 2."""
    short = shutil.copytree(small / "model", tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    (tmp_path / "book.txt").write_text("The quick brown fox jumps over the lazy dog. " * 300)
    flags = ["--model_name_or_path", str(short), "--train_file", str(tmp_path / "book.txt")]
    flags += ["--seq_len", "1024", "--max_steps", "1", "--use_cpu", "--disable_tqdm", "true"]
    flags += ["--cache_dir", str(tmp_path / "cache"), "--save_strategy", "no"]
    with pytest.raises(UserError, match="--rope_scaling yarn"):
        run(flags, tmp_path / "none")
    losses = {
        class_type: run(
            [*flags, "--rope_scaling", "yarn"], tmp_path / class_type, "--class_type", class_type
        )[0]["loss"]
        for class_type in ("vanilla", "custom")
    }
    assert losses["custom"] == pytest.approx(losses["vanilla"], rel=2e-5)
    saved = AutoConfig.from_pretrained(tmp_path / "custom" / "final")
    assert saved.max_position_embeddings == 1024
    assert saved.rope_parameters["rope_type"] == "yarn"
    assert saved.rope_parameters["factor"] == 2
    assert saved.rope_parameters["original_max_position_embeddings"] == 512
    plain = AutoModelForCausalLM.from_pretrained(short)
    yarn = AutoModelForCausalLM.from_pretrained(tmp_path / "custom" / "final")
    assert yarn.model.rotary_emb.attention_scaling > 1
    ratio = plain.model.rotary_emb.inv_freq / yarn.model.rotary_emb.inv_freq
    assert ratio[0] == pytest.approx(1) and ratio[-1] == pytest.approx(2)
    further = ["--model_name_or_path", str(tmp_path / "custom" / "final"), "--seq_len", "2048"]
    with pytest.raises(UserError, match="starts from plain RoPE, but this model's is 'yarn'"):
        run([*flags, *further, "--rope_scaling", "linear"], tmp_path / "further")
