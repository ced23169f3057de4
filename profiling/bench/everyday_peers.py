"""Rows and peers of everyday_bench.py: what runs beside us, each at its best settings.

    liger    Hugging Face's layers with Liger-Kernel's, flash-attn-4 by documents (peers.py); PEFT's
             adapters in bf16, as TRL casts them, or in fp32, as PEFT makes them
    compile  Hugging Face's layers under torch.compile, one graph a shape, with torch's attention
    compile_loss    the same layers, and longctx's loss over what they return
    trl      TRL's DPOTrainer over the `liger` model; the reference's log-probabilities are there
             before the steps, as ours are. It pads pairs: TRL 1.16 ignores its padding_free

Weights that train are in bf16, with torch's fused AdamW in bf16: the least work that each can do.
What loads models is imported where it is needed: in Unsloth's process it would be patched.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, default_collate
from transformers import AutoModelForCausalLM, PretrainedConfig

from longctx.attention.documents import Documents
from longctx.constants import GIB, IGNORE_INDEX
from longctx.errors import UserError
from longctx.families.adapters import inside_peft
from profiling.bench import peers
from profiling.bench.step_clock import Clock, time_loop, time_trainer

BF16 = torch.bfloat16
WORDS = 1000
"""Tokens are drawn below this number."""
END = 1
"""The token at the end of an answer."""
DOCUMENTS = (100, 1500)
"""The fewest and the most tokens of a packed document."""
BATCHES = 4
"""Batches of a loop, taken in turn."""
EPOCH_PAIRS = 60
"""Pairs, taken in their order and then again."""
PROMPTS, ANSWERS = (100, 1500), (50, 700)
"""The fewest and the most tokens of a prompt and of an answer, where pairs vary."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the table, whoever computes it."""

    name: str
    preset: str
    tokens: int
    """The tokens of a row, or of a pair's prompt with one answer, half of them each. Where pairs
    vary, those of our row, which holds whole pairs."""
    rows: int = 1
    lora: int = 0
    quantize: str = "none"
    gpu_gib: float = 0
    """Our budget of GPU memory (0: all)."""
    task: str = "sft"
    documents: bool = False
    peer_pairs: int = 0
    """Pairs in a peer's batch, where pairs vary; 0: all are alike, and `rows` are in a batch."""
    layers: int | None = None
    """Layers of the model, if fewer than the preset has."""
    all_held: bool = False
    """Whether `gpu_gib` holds a peer's allocator, too."""

    @property
    def text(self) -> str:
        """The word that selects this case on the command line."""
        return f"{self.name}:{self.tokens}" + (f"@{self.gpu_gib:g}" if self.gpu_gib else "")

    @property
    def row_tokens(self) -> int:
        """The tokens of our row, which has a prompt once."""
        return self.tokens * 3 // 2 if self.task == "dpo" and not self.peer_pairs else self.tokens

    @property
    def step_tokens(self) -> int:
        """The tokens of a step, a prompt counted once an answer."""
        return self.rows * self.tokens * (2 if self.task == "dpo" else 1)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a peer's layers keep for backward, where it waits, and how its adapters are held."""

    checkpointing: str
    offload: bool = False
    """Whether what layers keep waits in host memory (`+host`)."""
    adapters: str = "bf16"
    """Dtype of the adapters: bf16, or fp32 (`+fp32`)."""
    tiled_mlp: bool = False
    """Whether the MLP runs in tiles of the row (`+tiled_mlp`); Unsloth's alone."""
    nf4: bool = False
    """Whether frozen weights are in NF4 (`+nf4`), where the case has them in 16 bits or packed as
    they are published."""

    @classmethod
    def parsed(cls, word: str) -> Setting:
        """The setting of a word: `selective`, `layers+host`, `unsloth+tiled_mlp`. Raises ValueError
        for an unknown part."""
        checkpointing, *parts = word.split("+")
        known = ("host", "fp32", "tiled_mlp", "nf4")
        if unknown := {*parts} - {*known}:
            raise ValueError(f"{word}: {sorted(unknown)[0]} is none of {', '.join(known)}")
        return cls(
            checkpointing=checkpointing,
            offload="host" in parts,
            adapters="fp32" if "fp32" in parts else "bf16",
            tiled_mlp="tiled_mlp" in parts,
            nf4="nf4" in parts,
        )


# --- rows ------------------------------------------------------------------------------------


def document_lengths(tokens: int, numbers: random.Random) -> list[int]:
    """The documents that fill a row; the last is what room the others leave."""
    lengths: list[int] = []
    while (room := tokens - sum(lengths)) > 0:
        lengths.append(min(room, numbers.randint(*DOCUMENTS)))
    return lengths


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens, the same ones in every run; the first token of a document is no
    label."""

    def __init__(self, case: Case, count: int) -> None:
        self.case, self.count = case, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:  # each (tokens,)
        tokens = self.case.tokens
        lengths = [tokens]
        if self.case.documents:
            lengths = document_lengths(tokens, random.Random(index))
        position_ids = torch.cat([torch.arange(n) for n in lengths])
        ids = torch.randint(WORDS, (tokens,), generator=torch.Generator().manual_seed(index))
        labels = ids.masked_fill(position_ids == 0, IGNORE_INDEX)
        return {"input_ids": ids, "labels": labels, "position_ids": position_ids}


def batches(case: Case, device: torch.device, bounds: bool) -> list[dict[str, Any]]:
    """Batches on the device. Without `bounds` a row of one document has no position_ids, so that
    attention takes its causal path; with them they are there as TRL's collator makes them, and no
    step reads them back."""
    rows = Rows(case, BATCHES * case.rows)
    found = []
    for first in range(0, len(rows), case.rows):
        batch: dict[str, Any] = default_collate([rows[first + i] for i in range(case.rows)])
        batch = {name: x.to(device) for name, x in batch.items()}
        if bounds:
            documents = Documents.from_position_ids(batch["position_ids"])
            batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = documents.cu_seqlens
            batch["max_length_q"] = batch["max_length_k"] = max(documents.lengths)
        elif not case.documents:
            del batch["position_ids"]
        found.append(batch)
    return found


# --- peers -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Peer:
    """How a peer's model is made."""

    load: Callable[[Case, Setting, Path], Any]
    """Returns what a step calls, from a folder of weights if the peer reads one."""
    autocast: bool = False
    bounds: bool = False


def measure_peer(peer: Peer, case: Case, setting: Setting, clock: Clock, folder: Path) -> Any:
    """Runs the steps of a case, TRL's of preference pairs or a plain loop's of rows, over a model
    of `folder`, and returns the model."""
    case = replace(case, quantize="nf4") if setting.nf4 else case
    model = peer.load(case, setting, folder)
    if case.task == "dpo":
        with tempfile.TemporaryDirectory() as output:
            trainer = dpo_trainer(model, case, setting.checkpointing, clock.total, Path(output))
            time_trainer(trainer, clock)
        return model
    device = next(model.parameters()).device
    time_loop(model, batches(case, device, peer.bounds), clock, peer.autocast)
    return model


def load_hf(case: Case, setting: Setting, class_type: str) -> Any:
    """Hugging Face's layers in bf16 (fp32 without a GPU), with adapters and NF4 as the case says.
    Liger-Kernel needs a GPU, so without one its layers are Hugging Face's."""
    from longctx.train.start.loading import load_model

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    adapters = dict(lora_r=case.lora, quantize=case.quantize) if case.lora else {}
    args = model_options(case, class_type=class_type if on_gpu else "vanilla", **adapters)
    model = load_model(args, config_of(case), device=device)
    inside_peft(model).config.use_cache = False
    if on_gpu:
        cast_trained(model, torch.float32 if case.lora and setting.adapters == "fp32" else BF16)
    return model.train()


def cast_trained(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Casts the parameters that train."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def model_options(case: Case, class_type: str = "vanilla", **more: Any) -> Any:
    """train.py's options of a model."""
    from profiling.build import model_arguments

    settings = dict(preset=case.preset, tokens=case.tokens, backend="sdpa", class_type=class_type)
    return model_arguments(settings, **more)


def config_of(case: Case, **special_ids: int) -> PretrainedConfig:
    from longctx.train.start.loading import load_config
    from profiling.build import VOCABULARY

    config = load_config(model_options(case), vocab_size=VOCABULARY, special_ids=special_ids)
    config.num_hidden_layers = case.layers or config.num_hidden_layers
    return config


def load_liger(case: Case, setting: Setting, folder: Path) -> Any:
    model = load_hf(case, setting, "liger")
    if case.task != "dpo":  # TRL's trainer chooses what layers keep, and pads its pairs
        peers.attend_by_documents(inside_peft(model))
        peers.keep(inside_peft(model), setting.checkpointing, setting.offload)
    return model


class CompiledWithOurLoss(torch.nn.Module):
    """Layers under torch.compile, and a loss that makes logits in chunks and is in no graph."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.layers = model, torch.compile(model.base_model)

    def forward(self, labels: torch.Tensor, **batch: torch.Tensor) -> SimpleNamespace:  # (B, S)
        from longctx.head.loss import linear_cross_entropy

        hidden = self.layers(**batch).last_hidden_state[:, :-1]
        weight = self.model.lm_head.weight
        return SimpleNamespace(loss=linear_cross_entropy(hidden, weight, labels[:, 1:]))


PEERS = {
    "liger": Peer(load=load_liger, bounds=True),
    "compile": Peer(
        load=lambda case, setting, folder: torch.compile(load_hf(case, setting, "vanilla"))
    ),
    "compile_loss": Peer(
        load=lambda case, setting, folder: CompiledWithOurLoss(load_hf(case, setting, "vanilla"))
    ),
    "trl": Peer(load=load_liger),
}

# --- pairs -----------------------------------------------------------------------------------


def tokenizer() -> Any:
    """One token a word: `w4` to `w999`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", "</s>", "<pad>", "<unk>", *(f"w{n}" for n in range(4, WORDS))]
    vocabulary = {name: number for number, name in enumerate(names)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


class Pair(NamedTuple):
    """A prompt and its two answers, without the END of each."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def pairs(case: Case) -> list[Pair]:
    """The pairs of an epoch, the same in every run and for every side."""
    numbers, half = random.Random(0), case.tokens // 2

    def words(limits: tuple[int, int], end: int = 0) -> list[int]:
        tokens = numbers.randint(*limits) if case.peer_pairs else half
        return [numbers.randrange(4, WORDS) for _ in range(tokens - end)]

    def pair() -> Pair:
        return Pair(words(PROMPTS), words(ANSWERS, end=1), words(ANSWERS, end=1))

    return [pair() for _ in range(EPOCH_PAIRS)]


def pairs_in_words(case: Case) -> Any:
    """The pairs as a dataset of texts. TRL adds the end of each answer."""
    import datasets

    lines = [
        {name: "".join(f"w{n} " for n in ids) for name, ids in pair._asdict().items()}
        for pair in pairs(case)
    ]
    return datasets.Dataset.from_list(lines)


def packed_pairs(case: Case) -> list[dict[str, Any]]:
    """Our rows of the pairs, as `longctx train --task dpo` packs them: whole pairs, each prompt
    once. Of pairs that are alike each fills a row. The reference's log-probabilities are 0."""
    import numpy as np

    from longctx.train.data.pack.packing_groups import GroupStats, pack_groups
    from longctx.train.data.reading.groups import AnswerGroup
    from longctx.train.tasks.reference import REFERENCE

    groups = [
        AnswerGroup(
            np.array(prompt, np.int32),
            tuple(np.array([*answer, END], np.int32) for answer in answers),
            (0, 1),
            number,
        )
        for number, (prompt, *answers) in enumerate(pairs(case))
    ]
    packed = pack_groups(
        groups,
        case.row_tokens,
        long_documents="split",
        pad_token_id=0,
        stats=GroupStats(),
        where=lambda number: f"pair {number}",
    )
    return [{**row, REFERENCE: np.zeros(int((row["sides"] >= 0).sum()))} for row in packed]


def dpo_trainer(model: Any, case: Case, checkpointing: str, steps: int, folder: Path) -> Any:
    """TRL's trainer of pairs, or what another peer has put in its place."""
    from trl import DPOConfig, DPOTrainer

    on_gpu = torch.cuda.is_available()
    args = DPOConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=case.peer_pairs or case.rows,
        train_sampling_strategy="sequential",
        max_length=case.tokens,
        precompute_ref_log_probs=True,
        gradient_checkpointing=checkpointing != "none",
        bf16=True,
        optim="adamw_torch_fused",
        logging_steps=steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not on_gpu,
    )
    return DPOTrainer(
        model=model,
        args=args,
        train_dataset=pairs_in_words(case),
        processing_class=tokenizer(),
    )


# --- weights ---------------------------------------------------------------------------------


def make_weights(case: Case, folder: Path) -> None:
    """Writes a folder of random bf16 weights with a tokenizer, for a peer that reads one; the
    tokenizer comes last. Raises UserError where there is no room."""
    from longctx.train.start.loading import weights_bytes

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = config_of(case, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    needed = weights_bytes(model_options(case, dtype="bfloat16"), config, device)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < 1.05 * needed:
        raise UserError(
            f"{folder} has {free / GIB:.1f} GiB free, the weights need {needed / GIB:.1f}: "
            "name another folder with --models"
        )
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
