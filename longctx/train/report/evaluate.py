"""What a model makes of a long context: loss by position, and needles found in long texts.

    longctx eval runs/books/final --eval_file held-out/*.txt --seq_len 32768 --output eval.json

Loss by position: windows of seq_len tokens of single documents, no packing; the mean loss of the
tokens in each of the buckets 0..1/16, 1/16..1/4, 1/4..1/2 and 1/2..1 of seq_len (at 32768: 0-2K,
2K-8K, 8K-16K, 16K-32K). A model that uses its context has a loss that falls with position;
one beyond its positions has a loss that explodes. Needles: needle.py, at 1/8, 1/4, 1/2 and
all of seq_len. With --ruler also tasks of RULER, which generate (ruler.py).

The model runs as plain Hugging Face, without labels; logits are made 1024 tokens at a time, so a
window costs its attention and little memory.
"""

from __future__ import annotations

import io
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from longctx.errors import UserError, many, one_line, printable, say
from longctx.loop.metrics import peak_memory
from longctx.train.data.reading.files import find_files
from longctx.train.data.reading.sources import read_documents
from longctx.train.data.reading.unread_media import unread_line
from longctx.train.data.text.encoding import encode
from longctx.train.data.text.tokenizer import load_tokenizer
from longctx.train.loading.pretrained import read_config
from longctx.train.options.config import DataArguments, ModelArguments
from longctx.train.options.recipe import read_text
from longctx.train.options.written import LENGTH, dtype_named, token_count
from longctx.train.program import Parser
from longctx.train.report.needle import DEPTHS, needles
from longctx.train.report.page import legend_name, pyplot
from longctx.train.report.ruler import check_ruler, ruler, ruler_lines
from longctx.train.safety.writing import MARK, check_writable, replace_file
from longctx.train.start.loading import load_config, load_model

LOGIT_TOKENS = 1024
"""Tokens whose logits exist at a time: in fp32 0.5 GiB of 128256 words."""
PICTURES = {"png": "Software", "pdf": "Creator", "svg": "Creator"}
"""Ending -> what such a file calls the program that made it."""
Result = dict[str, Any]


class Ruler(NamedTuple):
    """The tasks of RULER to run, the lengths of their texts in tokens, and how many texts of each
    length a task has (ruler.py)."""

    tasks: list[str]
    lengths: list[int]
    samples: int


PEAKS = {
    "peak_gpu_gib": "of GPU memory",
    "peak_reserved_gib": "reserved by torch",
    "peak_host_gib": "of host memory",
}
"""Figures of peak_memory -> what they are of. Loading the model counts."""


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    if args.plot and not args.output:
        raise UserError("--plot draws what --output holds: give both")
    for name in ("windows", "repeats", "samples"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} must be at least 1, got {getattr(args, name)}")
    lengths = check_ruler(args.ruler, args.seq_len) if args.ruler else []
    model_args = ModelArguments(
        model_name_or_path=args.model,
        class_type="vanilla",
        seq_len=args.seq_len,
        extend_context=True,
        rope_scaling=args.rope_scaling,
        dtype=args.dtype,
        trust_remote_code=args.trust_remote_code,
    )
    name = args.name or args.model
    if args.output:
        # What holds no results is refused when it is read.
        check_writable(args.output, *find_files(args.eval_file), ours=lambda path: True)
        others = read_others(args.output, name)
    if args.plot:
        check_picture(args.plot, others, [args.output, *find_files(args.eval_file)])
    try:
        asked = Ruler(args.ruler, lengths, args.samples)
        result = evaluate(model_args, args.eval_file, args.windows, args.repeats, asked)
    except torch.OutOfMemoryError as error:
        raise UserError("out of GPU memory: a shorter --seq_len or --dtype bfloat16") from error
    result = {"name": name, **result}
    say(*summary(result).splitlines())
    if args.output:
        # Read again: another evaluation may have ended.
        results = [*read_others(args.output, name), result]
        write_results(args.output, results)
        if args.plot:
            replace_file(args.plot, picture(results, args.plot))


def _parser() -> Parser:
    parser = Parser(prog="longctx eval", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("--eval_file", nargs="+", required=True, help="files, folders or globs")
    parser.add_argument(
        "--seq_len", type=token_count, default=32768, help=f"tokens in a window, {LENGTH}"
    )
    parser.add_argument(
        "--rope_scaling",
        default="none",
        choices=["none", "yarn", "linear"],
        help="as in a run, for a model that was not trained to --seq_len; none extrapolates",
    )
    parser.add_argument("--windows", type=int, default=16, help="windows for the loss, at most")
    parser.add_argument("--repeats", type=int, default=4, help="needles for every length and depth")
    parser.add_argument(
        "--ruler", nargs="+", default=[], metavar="TASK", help="tasks of RULER, too, by lm-eval"
    )
    parser.add_argument("--samples", type=int, default=20, help="texts of a task and a length")
    parser.add_argument(
        "--dtype", type=dtype_named, default="auto", choices=["auto", "float32", "bfloat16"]
    )
    parser.add_argument("--name", help="what to call the model; default: its path")
    parser.add_argument("--output", type=Path, help="JSON file; others' results in it stay")
    parser.add_argument("--plot", type=Path, help="picture of all results in --output")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the model's own code")
    return parser


def evaluate(
    model_args: ModelArguments,
    eval_files: list[str],
    windows: int,
    repeats: int,
    asked: Ruler,
) -> Result:
    """Returns both measures of a model on held-out text, and the tasks of RULER that are asked for.

    Raises UserError if no document has `seq_len` tokens.
    """
    seq_len = model_args.seq_len
    if seq_len < 64:
        raise UserError(f"--seq_len must be at least 64 for an evaluation, got {seq_len}")
    tokenizer = load_tokenizer(model_args, DataArguments())
    texts = cut_windows(eval_files, tokenizer, seq_len, windows)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lengths = [seq_len // 8, seq_len // 4, seq_len // 2, seq_len]
    next(needles(texts, tokenizer, lengths=lengths, repeats=1))  # too short for one?
    own = read_config(replace(model_args.source, frozen=True)).get_text_config()
    config = load_config(model_args, vocab_size=len(tokenizer), frozen=True)
    model = load_model(model_args, config, device=device).to(device).eval()  # type: ignore[arg-type]
    start = time.perf_counter()
    result = {
        "seq_len": seq_len,
        "positions": getattr(own, "max_position_embeddings", None),
        "rope": dict(model.config.get_text_config().rope_parameters),
        "windows": len(texts),
        "loss_by_position": loss_by_position(model, texts, device),
        "needles": find_needles(model, tokenizer, texts, lengths, repeats, device),
    }
    if asked.tasks:
        result["ruler"] = [*ruler(model, tokenizer, *asked)]
    # All have read their results back, so that nothing is left for the GPU to do.
    return {**result, "seconds": time.perf_counter() - start, **peak_memory(device)}


def cut_windows(
    files: list[str], tokenizer: PreTrainedTokenizerBase, seq_len: int, windows: int
) -> list[np.ndarray]:
    """Returns at most `windows` stretches of seq_len tokens, each of one document: the first of
    every document before the second of any."""
    documents = [d for d in read_documents(find_files(files, tell=say)) if d.kind == "text"]
    for document in [d for d in documents if d.unread][:1]:
        say(unread_line(document.where, document.unread))
    ids = [piece.input_ids for piece in encode(documents, tokenizer)]
    cut = [
        [tokens[i : i + seq_len] for i in range(0, len(tokens) - seq_len + 1, seq_len)]
        for tokens in ids
    ]
    chosen = [text for turn in zip_longest(*cut) for text in turn if text is not None]
    if not chosen:
        longest = max(map(len, ids), default=0)
        raise UserError(
            f"no document of {', '.join(files)} has {seq_len} tokens (the longest has {longest}): "
            "give longer ones, or a shorter --seq_len"
        )
    return chosen[:windows]


@torch.no_grad()
def token_losses(model: PreTrainedModel, input_ids: Tensor) -> Tensor:  # (1, S) -> (S - 1,) fp32
    """Returns the loss of every token but the first, with logits of LOGIT_TOKENS tokens at a
    time."""
    hidden = _hidden(model, input_ids)[0, :-1]
    head = model.get_output_embeddings()
    losses = [
        torch.nn.functional.cross_entropy(head(part).float(), labels, reduction="none")
        for part, labels in zip(
            hidden.split(LOGIT_TOKENS), input_ids[0, 1:].split(LOGIT_TOKENS), strict=True
        )
    ]
    return torch.cat(losses)


def loss_by_position(
    model: PreTrainedModel, texts: list[np.ndarray], device: torch.device
) -> list[Result]:
    """Returns one line a bucket: mean loss over windows, and the standard error of that mean."""
    losses = torch.stack([token_losses(model, _batch(text, device)).cpu() for text in texts])
    seq_len = len(texts[0])
    edges = [0, seq_len // 16, seq_len // 4, seq_len // 2, seq_len]
    lines = []
    for start, end in zip(edges, edges[1:], strict=False):
        means = losses[:, max(0, start - 1) : end - 1].mean(1)  # column i is the token i + 1
        error = float(means.std() / math.sqrt(len(means))) if len(means) > 1 else None
        lines.append(
            {"start": start, "end": end, "loss": float(means.mean()), "standard_error": error}
        )
    return lines


@torch.no_grad()
def find_needles(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[np.ndarray],
    lengths: list[int],
    repeats: int,
    device: torch.device,
) -> list[Result]:
    """Returns one line for every length and depth: the share of needles found."""
    found: dict[tuple[int, float], list[bool]] = {}
    for needle in needles(texts, tokenizer, lengths=lengths, repeats=repeats):
        input_ids = _batch(needle.input_ids, device)
        n = needle.answer_tokens
        hidden = _hidden(model, input_ids)[0, -n - 1 : -1]
        guess = model.get_output_embeddings()(hidden).argmax(-1)
        right = bool((guess == input_ids[0, -n:]).all())
        found.setdefault((needle.tokens, needle.depth), []).append(right)
    return [
        {"tokens": tokens, "depth": depth, "found": sum(hits) / len(hits), "tries": len(hits)}
        for (tokens, depth), hits in found.items()
    ]


def score(result: Result) -> float:
    """Returns the share of all needles that were found."""
    return float(np.mean([line["found"] for line in result["needles"]]))


def summary(result: Result) -> str:
    """Returns a few lines for people."""
    lines = [
        f"{printable(result['name'])}: {many(result['windows'], 'window')} of "
        f"{result['seq_len']} tokens",
        *beyond_positions(result),
    ]
    for bucket in result["loss_by_position"]:
        spread = bucket["standard_error"]
        error = "" if spread is None else f" +- {spread:.4f}"
        lines.append(f"  loss {bucket['start']:>6}-{bucket['end']:<6} {bucket['loss']:.4f}{error}")
    for tokens in sorted({line["tokens"] for line in result["needles"]}):
        share = np.mean([line["found"] for line in result["needles"] if line["tokens"] == tokens])
        lines.append(f"  needles found at {tokens:>6} tokens: {share:.0%}")
    lines.append(f"  needles found in all: {score(result):.0%}")
    lines += [f"  {printable(line)}" for line in ruler_lines(result.get("ruler", []))]
    peaks = [f"{result[name]:.2f} GiB {of}" for name, of in PEAKS.items() if name in result]
    return "\n".join([*lines, f"  {result['seconds']:.1f} s; at the peak {', '.join(peaks)}"])


def beyond_positions(result: Result) -> Iterator[str]:
    """Yields a line where windows are longer than the model's positions, and what RoPE does there:
    losses and needles are then of positions for which the model may never have been trained."""
    limit = result.get("positions")
    if limit is None or result["seq_len"] <= limit:
        return
    kind = result["rope"].get("rope_type", "default")
    says = f"with RoPE {kind}"
    if kind == "default":
        says = "where its RoPE is extrapolated; --rope_scaling yarn stretches it"
    yield f"  beyond the {limit} positions of the model's config.json, {says}"


def read_others(path: Path, name: str) -> list[Result]:
    """Returns the results in a file, if there is one yet, but those of this name.

    Raises UserError for another file.
    """
    if not os.path.exists(path):
        return []
    text = read_text("output", path)
    try:
        results = json.loads(text)
        if not isinstance(results, list):
            raise TypeError("not a list")
        for old in results:
            old["loss_by_position"][0]["loss"], old["needles"][0]["found"]
            if not isinstance(old["name"], str):
                raise TypeError("a name that is no text")
        json.dumps(results, indent=1)  # what is nested deeply could be read, but not written again
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{path} holds no results of longctx eval: give another file") from error
    return [old for old in results if old["name"] != name]


def write_results(path: Path, results: list[Result]) -> None:
    replace_file(path, json.dumps(results, indent=1).encode())


def check_picture(path: Path, others: list[Result], inputs: Sequence[Path]) -> None:
    """Raises UserError where a picture could not be written after hours of work."""
    pyplot()  # where it is not installed, that is said first
    if path.suffix[1:].lower() not in PICTURES:
        raise UserError(f"cannot write {path}: name it .png, .pdf or .svg")
    check_writable(path, *inputs)
    if others:
        picture(others, path)


def picture(results: Sequence[Result], path: Path) -> bytes:
    """Returns the picture in the format that the path's ending names. Raises UserError for results,
    as another version may have written them, that cannot be drawn."""
    file = io.BytesIO()
    try:
        kind = path.suffix[1:].lower()
        draw(results).savefig(file, format=kind, dpi=120, metadata={PICTURES[kind]: MARK.decode()})
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise UserError(
            f"--output holds results that cannot be drawn ({one_line(error)}): give another file"
        ) from error
    return file.getvalue()


def draw(results: Sequence[Result]) -> Any:
    """Loss by position for all models, and a grid of needles (length by depth) for each."""
    figure, axes = pyplot().subplots(
        1, 1 + len(results), figsize=(4.5 + 3 * len(results), 3.6), layout="constrained"
    )
    for number, result in enumerate(results):
        buckets = result["loss_by_position"]
        style = dict(
            marker="o", linestyle=("-", "--")[number % 2], label=legend_name(result["name"])
        )
        labels = [f"{_short(b['start'])}-{_short(b['end'])}" for b in buckets]
        axes[0].plot(labels, [b["loss"] for b in buckets], **style)
    axes[0].set(title="loss by position", xlabel="tokens", ylabel="loss")
    axes[0].tick_params(axis="x", labelsize=8)
    axes[0].legend(fontsize=7)
    for axis, result in zip(axes[1:], results, strict=True):
        lengths = sorted({line["tokens"] for line in result["needles"]})
        found = {(line["tokens"], line["depth"]): line["found"] for line in result["needles"]}
        grid = [[found[tokens, depth] for tokens in lengths] for depth in DEPTHS]
        axis.imshow(grid, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        axis.grid(False)
        for (tokens, depth), share in found.items():
            at = (lengths.index(tokens), DEPTHS.index(depth))
            colour = "white" if share > 0.6 else "black"
            axis.text(*at, f"{share:.0%}", ha="center", va="center", fontsize=8, color=colour)
        axis.set_xticks(range(len(lengths)), [_short(tokens) for tokens in lengths])
        axis.set_yticks(range(len(DEPTHS)), [f"{depth:.0%}" for depth in DEPTHS])
        axis.set(
            title=f"{printable(result['name'])}: {score(result):.0%} of needles", xlabel="tokens"
        )
        axis.set_ylabel("depth")
    return figure


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 else str(tokens)


def _hidden(model: PreTrainedModel, input_ids: Tensor) -> Tensor:  # (1, S) -> (1, S, D)
    return model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state


def _batch(ids: np.ndarray, device: torch.device) -> Tensor:  # (S,) -> (1, S)
    return torch.as_tensor(ids, dtype=torch.int64, device=device)[None]
