"""Folders with a small model that sees and its processor, and conversations about images."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from small_layer import assert_exact_run, cast
from small_tokenizer import small_tokenizer
from small_vision import move_, skip_with_kernels, vision_config
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    CLIPImageProcessor,
    Gemma3ImageProcessor,
    Gemma3Processor,
    LlavaProcessor,
    set_seed,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from exactness import FACTOR, FLOOR, relative_error
from longctx.train.data.images.processor import ImageProcessor
from longctx.train.data.origins import images_of
from longctx.train.data.packed_rows import ImageReading, RowOptions, build_dataset
from longctx.train.options.config import DataArguments, TrainArguments
from longctx.train.start.image_batches import ImageCollator, RowsWithImages
from longctx.train.tasks import make_task

PLACES = {
    "gemma3": "<start_of_image>",
    "llava": "<image>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_5": "<|vision_start|><|image_pad|><|vision_end|>",
}
_SPECIAL = {
    "gemma3": ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    "llava": ("<image>",),
    "qwen": ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
}
COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 210)}


def template(place: str) -> str:
    """ChatML that takes contents as parts alone, as LLaVA's own does."""
    return (
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% for part in m['content'] %}{% if part['type'] == 'image' %}" + place + "{% else %}"
        "{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def tokenizer_of(kind: str) -> Any:
    tokenizer = small_tokenizer(template(PLACES[kind]))
    names = _SPECIAL["qwen" if kind.startswith("qwen") else kind]
    tokenizer.add_special_tokens({"additional_special_tokens": [*names]})
    if kind == "gemma3":
        roles = ("boi_token", "image_token", "eoi_token")
        tokenizer._set_model_specific_special_tokens(dict(zip(roles, names, strict=True)))
    return tokenizer


def image_model(folder: Path, kind: str) -> Path:
    """Writes a model, its tokenizer and what prepares its images."""
    skip_with_kernels(kind)
    tokenizer = tokenizer_of(kind)
    config = vision_config(kind, vocab_size=len(tokenizer))
    ids = tokenizer.convert_tokens_to_ids
    if kind.startswith("qwen"):
        config.image_token_id, config.video_token_id = ids("<|image_pad|>"), ids("<|video_pad|>")
        config.vision_start_token_id = ids("<|vision_start|>")
        config.vision_end_token_id = ids("<|vision_end|>")
        sizes = {"shortest_edge": 64, "longest_edge": 1024}
        Qwen2VLImageProcessorPil(patch_size=4, size=sizes).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    elif kind == "gemma3":
        config.image_token_index = config.image_token_id = ids("<image_soft_token>")
        images = Gemma3ImageProcessor(size={"height": 16, "width": 16})
        Gemma3Processor(images, tokenizer, image_seq_length=4).save_pretrained(folder)
    else:
        config.image_token_index = config.image_token_id = ids("<image>")
        LlavaProcessor(
            CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16),
            tokenizer,
            patch_size=4,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            image_token="<image>",
        ).save_pretrained(folder)
    set_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    move_(model)
    model.save_pretrained(folder)
    return folder


def asked(*names: str, question: str = "What colour is it?", answer: str = "red") -> dict[str, Any]:
    """A conversation that shows images before a question."""
    content = [_part(name) for name in names]
    return {
        "messages": [
            {"role": "user", "content": [*content, {"type": "text", "text": question}]},
            {"role": "assistant", "content": f"It is {answer}."},
        ]
    }


def exchange(question: str, answer: str) -> list[dict[str, str]]:
    """The turns of a conversation without images of its own."""
    turns = (("user", question), ("assistant", answer))
    return [{"role": role, "content": content} for role, content in turns]


def in_turns() -> dict[str, Any]:
    """A conversation whose first answer stands between images of several sizes."""
    first = [_part("red.png"), {"type": "text", "text": "What?"}, _part("wide.png")]
    second = [{"type": "text", "text": "And "}, _part("green.png"), {"type": "text", "text": "?"}]
    return {
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": first},
            {"role": "assistant", "content": "Red, then a wide one."},
            {"role": "user", "content": second},
            {"role": "assistant", "content": "Green."},
        ]
    }


def compared(*names: str, chosen: str = "red", rejected: str = "a very wide one") -> dict[str, Any]:
    """A pair of answers to a question that shows images."""
    asking, answer = asked(*names, answer=chosen)["messages"]
    other = {**answer, "content": f"No, {rejected}."}
    return {"prompt": [asking], "chosen": [answer], "rejected": [other]}


def pairs_about_colours(count: int = 6) -> list[dict[str, Any]]:
    """Pairs about one image, several and none."""
    names = [*COLOURS]
    shown = [(), ("red.png",), ("blue.png", "wide.png"), ("green.png",)]
    return [compared(*shown[n % 4], chosen=names[n % 3]) for n in range(count)]


def _part(name: str) -> dict[str, str]:
    return {"type": "image", "image": name}


def write(folder: Path, records: Sequence[dict[str, Any]]) -> Path:
    """Writes the records, and an image of each colour and a wide one beside them."""
    for colour, rgb in COLOURS.items():
        Image.new("RGB", (20 + len(colour), 16), rgb).save(folder / f"{colour}.png")
    Image.new("RGB", (60, 12), "yellow").save(folder / "wide.png")
    file = folder / "pictures.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def about_colours(count: int = 12) -> list[dict[str, Any]]:
    """Conversations about one image, several and none."""
    names = [*COLOURS]
    found = []
    for n in range(count):
        name, other = names[n % 3], names[(n + 1) % 3]
        shown = [(), (name,), (f"{name}.png", f"{other}.png")][n % 3]
        shown = tuple(x if x.endswith(".png") else f"{x}.png" for x in shown)
        found.append(asked(*shown, answer=name))
    return found


def prepared(kind: str, model: Path, text: str, images: Sequence[Image.Image]) -> dict[str, Tensor]:
    """What transformers' own processor makes of a rendered conversation. Without torchvision,
    Qwen's is its image processor, and an image's tokens follow from the grid of its patches."""
    try:
        processor = AutoProcessor.from_pretrained(model)
    except ImportError:
        return _qwens(model, text, images)
    many = {"images": [*images]} if images else {}
    return {**processor(text=[text], **many, add_special_tokens=False, return_tensors="pt")}


def _qwens(model: Path, text: str, images: Sequence[Image.Image]) -> dict[str, Tensor]:
    tokenizer, pad = AutoTokenizer.from_pretrained(model), "<|image_pad|>"
    parts, made = text.split(pad), {}
    if images:
        processor = Qwen2VLImageProcessorPil.from_pretrained(model)
        made = {**processor([*images], return_tensors="pt")}
    counts = [int(grid.prod()) // 4 for grid in made.get("image_grid_thw", ())]
    assert len(parts) == len(counts) + 1
    whole = parts[0] + "".join(pad * n + part for n, part in zip(counts, parts[1:], strict=True))
    ids = tokenizer([whole], add_special_tokens=False, return_tensors="pt")["input_ids"]
    types = (ids == tokenizer.convert_tokens_to_ids(pad)).long()
    return {"input_ids": ids, "mm_token_type_ids": types, **made}


def alone(kind: str, model: Path, record: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    """A conversation (with each image in a part of its own) by itself, as transformers prepares
    it, and the labels of its answers: all that a turn adds to the prompt before it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    turns = [
        {**turn, "content": [{"type": "text", "text": turn["content"]}]}
        if isinstance(turn["content"], str)
        else turn
        for turn in record["messages"]
    ]

    def made(count: int, prompt: bool) -> dict[str, Tensor]:
        parts = [part for turn in turns[:count] for part in turn["content"]]
        named = [part["image"] for part in parts if part["type"] == "image"]
        images = [Image.open(folder / name).convert("RGB") for name in named]
        text = tokenizer.apply_chat_template(
            turns[:count], tokenize=False, add_generation_prompt=prompt
        )
        return prepared(kind, model, text, images)

    whole = made(len(turns), False)
    labels = torch.full_like(whole["input_ids"], -100)
    for n, turn in enumerate(turns):
        if turn["role"] == "assistant":
            start = made(n, True)["input_ids"].shape[1]
            end = made(n + 1, False)["input_ids"].shape[1] - 1  # not the line's end
            labels[:, start:end] = whole["input_ids"][:, start:end]
    return {**whole, "labels": labels}


class Read:
    """Rows and batches of a file or a dataset, for a model of a kind."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        pixels: int | None = None,
        task: str = "sft",
        class_type: str = "custom",
        **data: Any,
    ) -> None:
        self.task = make_task(TrainArguments(str(folder), task=task, use_cpu=True))
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        config = AutoConfig.from_pretrained(model)
        self.images = ImageProcessor.read(str(model), config, self.tokenizer, pixels)
        self.opened = 0
        looks = self.images.opened
        self.args = DataArguments(cache_dir=str(folder / "cache"), **data)
        collate = self.task.collator(class_type, alone=True)
        self.collate = ImageCollator(self.images, config, torch.float32, collate)

        def opened(*args: Any) -> Any:
            self.opened += 1
            return looks(*args)

        self.images.opened = opened  # type: ignore[method-assign]

    def rows(self, seq_len: int = 256, *, one_document: bool = False) -> RowsWithImages:
        files = self.args.train_file
        packed = build_dataset(
            self.args,
            self.tokenizer,
            RowOptions(
                files=files,
                seq_len=seq_len,
                vocab_size=len(self.tokenizer),
                seed=1,
                rows=self.task.rows,
                mismatched=self.task.mismatched,
                image_reading=ImageReading(lambda: self.images, one_document),
            ),
        )
        return RowsWithImages(packed, images_of(self.args, files, self.task.rows))

    def batch(self, **options: Any) -> dict[str, Tensor]:
        """All rows in one."""
        rows = self.rows(**options)
        return self.collate([rows[n] for n in range(len(rows))])


def of_file(model: Path, folder: Path, records: Sequence[Any], **options: Any) -> Read:
    return Read(model, folder, train_file=[str(write(folder, records))], **options)


Run = tuple[Tensor, dict[str, Tensor]]
"""A loss, and the gradients of the parameters that have one, by name."""


def assert_as_each_alone(found: Run, naive: Any, alone: Callable[[Any], Run]) -> None:
    """A packed batch in fp32 is as exact as `alone`, which runs each of its documents by itself
    with a given model, is with `naive`: both are held to `alone` in fp64."""
    wide = cast(copy.deepcopy(naive), torch.float64)
    keys, queries = (terms_of(wide, name) for name in ("k_proj", "q_proj"))
    with keys as terms, queries as of_weights, query_terms(wide) as of_biases:
        truth = alone(wide)
    terms |= of_weights | of_biases
    loss, grads = found
    assert {*grads} == {*truth[1]}
    for name in [name for name in truth[1] if name.endswith("k_proj.bias") and "tower" in name]:
        del truth[1][name]  # 0 but for rounding
    ours, plain = (loss.detach(), {name: grads[name] for name in truth[1]}), alone(naive)
    # A softmax's gradients sum to 0 over the keys, so that what all patches share cancels in
    # dW = dk^T x, and in dq = ds k, whose sums the weight and the bias of q have. Rounding errors
    # are those of the terms, however little is left of their sum.
    for name in [name for name in terms if "tower" in name]:
        true, naively, packed = (run[1].pop(name) for run in (truth, plain, ours))
        floor = FLOOR[torch.float32] * terms[name] ** 0.5 / float(true.norm())
        limit = FACTOR * relative_error(naively, true) + floor
        assert relative_error(packed, true) <= limit, name
    assert_exact_run(ours, plain, truth, torch.float32)


@contextmanager
def terms_of(model: nn.Module, name: str) -> Iterator[dict[str, float]]:
    """Yields, by the names of the weights of all linear layers called `name`, the sum of squares of
    all terms dy_n x_d of the weight's gradient, over all tokens and calls: terms with independent
    relative errors eps give the gradient an error of eps times its root."""
    terms: dict[str, float] = {}

    def forward(weight: str, x: Tensor, y: Tensor) -> None:
        def add(dy: Tensor) -> None:
            found = dy.square().sum(-1).flatten() @ x.square().sum(-1).flatten()
            terms[weight] = terms.get(weight, 0.0) + float(found)

        if y.requires_grad:
            y.register_hook(add)

    hooks = [
        module.register_forward_hook(
            lambda _, xs, y, weight=f"{path}.weight": forward(weight, xs[0].detach(), y)
        )
        for path, module in model.named_modules()
        if path.endswith(name)
    ]
    try:
        yield terms
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def query_terms(model: nn.Module) -> Iterator[dict[str, float]]:
    """Yields, by the names of the biases of q in a vision tower without RoPE, the sum of squares of
    all terms ds_nj k_j of the bias's gradient, over all pairs of patches and calls."""
    terms: dict[str, float] = {}
    hooks: list[Any] = []

    def add(name: str, scale: float, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> None:
        p = (scale * q @ k.mT).softmax(-1)
        dp = do.unflatten(-1, (q.shape[1], -1)).transpose(1, 2) @ v.mT
        ds = scale * p * (dp - (p * dp).sum(-1, keepdim=True))
        terms[name] = terms.get(name, 0.0) + float((ds.square() @ k.square()).sum())

    def watch(name: str, module: Any) -> None:
        made: dict[str, Tensor] = {}

        def before(_: Any, given: tuple[Tensor]) -> None:
            heads = (made[x].unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for x in "qkv")
            if given[0].requires_grad:
                given[0].register_hook(partial(add, name, module.scale, *heads))

        for x in "qkv":
            linear = module.get_submodule(f"{x}_proj")
            hooks.append(
                linear.register_forward_hook(lambda _, given, y, x=x: made.update({x: y.detach()}))
            )
        hooks.append(module.out_proj.register_forward_pre_hook(before))

    for path, module in model.named_modules():
        if "tower" in path and getattr(getattr(module, "q_proj", None), "bias", None) is not None:
            watch(f"{path}.q_proj.bias", module)
    try:
        yield terms
    finally:
        for hook in hooks:
            hook.remove()
