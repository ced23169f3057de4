"""The run that every engine is compared with: a saved model, a few documents, vanilla alone. All
files of a worker have it once, and one warm process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from small_job import DORA, LORA, STEPS, Warm, batch
from small_tokenizer import small_tokenizer

from longctx.kernels import launch
from longctx.train.commands import train


@pytest.fixture(scope="module", autouse=True)
def references_are_plain(plain_kernels) -> None:
    """Reference runs in pytest's own process take torch's operations instead of interpreted
    kernels, as the runs that warm.py forks do."""


@pytest.fixture(scope="session")
def job(tmp_path_factory) -> list[str]:
    """Flags of the same training run, whatever the engine: a saved model and a few documents."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "text").mkdir()
    for i in range(30):
        words = " ".join(f"{(i * j) % 97} bottles of {j % 13}" for j in range(40 + 9 * i))
        (folder / "text" / f"{i}.txt").write_text(words)
    flags = ["--train_file", f"{folder}/text", "--cache_dir", f"{folder}/cache"]
    flags += ["--use_cpu", "true"]
    small_tokenizer().save_pretrained(folder / "tokenizer")
    flags += ["--seq_len", "128", "--learning_rate", "0.003", "--disable_tqdm", "true"]
    flags += ["--attn_backend", "auto", "--eval_file", f"{folder}/text/5.txt"]
    start = ["--preset", "tiny", "--class_type", "vanilla", "--max_steps", "1"]
    start += ["--learning_rate", "1e-12", "--save_strategy", "no"]
    start += ["--tokenizer_name", f"{folder}/tokenizer", "--output_dir", f"{folder}/start"]
    train.main([*flags, *start])
    model = ["--model_name_or_path", f"{folder}/start/final", "--max_steps", str(STEPS)]
    return [*flags, *model]


@pytest.fixture(scope="session")
def vanilla(job: list[str], tmp_path_factory) -> Path:
    """The reference: Hugging Face's model, one process, no engine."""
    folder = tmp_path_factory.mktemp("vanilla")
    train.main([*job, "--class_type", "vanilla", "--output_dir", str(folder), *batch(1)])
    return folder


@pytest.fixture(scope="session")
def adapted(job: list[str], tmp_path_factory) -> Path:
    """The reference of adapters: PEFT's layers and torch's AdamW, one process, no engine."""
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("adapted")
    words = ["--class_type", "vanilla", "--output_dir", str(folder), *batch(1)]
    train.main([*job, *LORA, *words])
    return folder


@pytest.fixture(scope="session")
def over_sixteen_bits(job: list[str], tmp_path_factory) -> Path:
    """Two steps of DoRA in fp32 over bf16, one process, no engine. Interpreted kernels would take
    minutes, and this is made before the fixtures of a module."""
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("over_sixteen_bits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "INTERPRETED", False)
        train.main([*job, *DORA, "--output_dir", str(folder), *batch(1)])
    return folder


@pytest.fixture(scope="session")
def warm(tmp_path_factory) -> Iterator[Warm]:
    warm = Warm(tmp_path_factory.mktemp("warm"))
    yield warm
    warm.end()
