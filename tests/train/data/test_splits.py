from __future__ import annotations

from pathlib import Path

import pytest

from longctx.train.data.reading.splits import choose

ONE = "  - {split: train, path: a.jsonl}\n  - {split: test, path: b.jsonl}\n"
CASES: dict[str, tuple[str, str, str, str | None]] = {
    # the README's YAML, the files, those that are read, the note
    "no words": ("", "part-0.jsonl part-1.jsonl", "part-0.jsonl part-1.jsonl", None),
    "held out beside no words": ("", "part-0.jsonl test.jsonl", "part-0.jsonl", ""),
    "words of datasets": (
        "",
        "train.csv validation.csv valid_1.csv dev-2.csv val.csv eval.csv x.evaluation.csv t.csv",
        "train.csv t.csv",
        "",
    ),
    "words in words": (
        "",
        "contest.csv devil.csv latest.csv",
        "contest.csv devil.csv latest.csv",
        None,
    ),
    "a folder goes before a name": (
        "",
        "test/train-0.csv train/test-1.csv",
        "train/test-1.csv",
        "",
    ),
    "a name of both": ("", "train_test_split.csv test.csv", "train_test_split.csv", ""),
    "held out alone": ("", "dev.csv test.csv", "dev.csv test.csv", "held-out"),
    "shards of one set": (
        "",
        "data/train-00000-of-00002.csv data/train-00001-of-00002.csv",
        "data/train-00000-of-00002.csv data/train-00001-of-00002.csv",
        None,
    ),
    "several sets": ("", "en/train.csv fr/train.csv", "en/train.csv fr/train.csv", ""),
    "two kinds of rows": ("", "train_sft.csv train_gen.csv", "train_sft.csv train_gen.csv", ""),
    "a README": (
        f"- config_name: x\n  data_files:\n{ONE}",
        "a.jsonl b.jsonl c.jsonl",
        "a.jsonl",
        "",
    ),
    "a README goes before names": (
        "- config_name: x\n  data_files: test/*.jsonl",
        "test/a.jsonl train.jsonl",
        "test/a.jsonl",
        "",
    ),
    "its default configuration": (
        "- config_name: x\n  data_files: a*\n- config_name: default\n  data_files: [b*, ./c.jsonl]",
        "a.jsonl b.jsonl c.jsonl",
        "b.jsonl c.jsonl",
        "",
    ),
    "its configurations without a default one": (
        "- config_name: x\n  data_files: a*\n- config_name: y\n  data_dir: y",
        "a.jsonl y/train.jsonl y/dev.jsonl z.jsonl",
        "a.jsonl y/train.jsonl",
        "",
    ),
    "its own names of splits": (
        "- config_name: x\n  data_files:\n  - {split: train_sft, path: '**/a*'}\n"
        "  - {split: test_sft, path: d/**}",
        "a.jsonl d/b.jsonl e/f/a.jsonl",
        "a.jsonl e/f/a.jsonl",
        "",
    ),
    "files that are not there": (
        "- config_name: x\n  data_files: ../*.jsonl",
        "a.jsonl test.jsonl",
        "a.jsonl",
        "",
    ),
    "a broken README": ("- [x\n", "a.jsonl test.jsonl", "a.jsonl", ""),
    "a README of other things": ("- 1\n- config_name: [x]\n", "a.jsonl", "a.jsonl", None),
}


@pytest.mark.parametrize(("card", "files", "read", "note"), CASES.values(), ids=CASES)
def test_training_rows_are_told_by_the_readme_or_by_names(tmp_path, card, files, read, note):
    if card:
        (tmp_path / "README.md").write_text(f"---\nconfigs:\n{card}\n---\nwords\n")
    paths = [Path(tmp_path, name) for name in files.split()]
    choice = choose(paths, tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in choice.read} == {*read.split()}
    assert {*choice.read} | {*choice.left} == {*paths}
    assert (choice.note is None) == (note is None) and (note or "") in (choice.note or "")
