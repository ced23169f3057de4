"""The tokenizer of a run: the one named, else the model's own, else one trained on the spot.

The default is a byte-level BPE with 8192 tokens, trained on the standard library's source files
(sources.py), so that `longctx train` needs no download:

    text        <|bos|> tokens of the text           (encoding.py ends a document with <|im_end|>)
    chat        <|bos|><|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                                                            ^^^^^^^^^^^^^^^ trained

Two cores train it in 1.7 s on 10.4 MB. 4096 tokens read 3.6 characters a token, 8192 read 4.0 and
16384 read 4.2, but twice the tokens double the embedding of the `tiny` preset.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from longctx.constants import VOCAB_SIZE
from longctx.errors import UserError, one_line, print_rank0
from longctx.system import expanded
from longctx.train.data.pack.cache import cache_path, digest, mark_used, write_text
from longctx.train.data.reading.files import stdlib_files
from longctx.train.data.reading.sources import read_documents
from longctx.train.data.text.tokenizer_trial import try_tokenizer
from longctx.train.options.config import DataArguments, ModelArguments
from longctx.train.safety.strange_files import MOST_JSON_BYTES, read_small, refuse_odd, refuse_run

LARGEST_ID = 2**24
"""The largest vocabularies have 300,000 tokens."""
BOS, END, PAD, START = "<|bos|>", "<|im_end|>", "<|pad|>", "<|im_start|>"
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def load_tokenizer(model_args: ModelArguments, data_args: DataArguments) -> PreTrainedTokenizerBase:
    """Returns the tokenizer named by --tokenizer_name, else the model's own, else the default one.

    Raises UserError when a folder or hub id holds no usable tokenizer.
    """
    name = model_args.tokenizer_name or model_args.model_name_or_path
    if name is None:
        return default_tokenizer(expanded(data_args.cache_dir))
    return read_tokenizer(name, trust_remote_code=model_args.trust_remote_code)


def default_tokenizer(cache_dir: Path, vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Trains the default tokenizer, or loads it from `cache_dir`; a corrupt file is replaced."""
    key = digest(vocab_size, platform.python_version(), tokenizers.__version__)
    path = cache_path(cache_dir, "tokenizer", key, ".json")
    backend = _load_backend(path)
    if backend is None:
        print_rank0(f"training a tokenizer of {vocab_size} tokens on Python's standard library")
        texts = (document.content for document in read_documents(stdlib_files()))
        backend = train_backend(texts, vocab_size)
        write_text(path, backend.to_str())
    return as_pretrained(backend)


def as_pretrained(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """Returns a backend of `train_backend` with its special tokens' roles and the chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def train_backend(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE with the four special tokens first and <|bos|> before every text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, END, PAD, START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, backend.token_to_id(BOS))],
    )
    return backend


def _load_backend(path: Path) -> Tokenizer | None:
    if not os.path.exists(path):
        return None
    mark_used(path)
    try:
        return Tokenizer.from_buffer(read_small(path, MOST_JSON_BYTES))
    except Exception as error:  # tokenizers raises bare Exception for a file it cannot parse
        print_rank0(f"rebuilding the cached tokenizer {path}: {one_line(error, 160)}")
        return None


def read_tokenizer(
    name: str, *, trust_remote_code: bool = False, remedy: str = "give one with --tokenizer_name"
) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a folder, a GGUF file or a hub id. Raises UserError, which names a
    `remedy`."""
    path = expanded(name)
    options: dict[str, str] = {}
    if path.suffix == ".gguf":
        if not os.path.isfile(path):
            raise UserError(f"{name} does not exist: check the path of the .gguf file")
        name, options = str(path.parent), {"gguf_file": path.name}
    elif os.path.isdir(path):
        refuse_run(name, path)
        refuse_odd(path)
        name = str(path)
    elif os.path.exists(path) or name.startswith((".", "/", "~")):
        raise UserError(f"{name} is no folder with a tokenizer: give another --tokenizer_name")
    _check_ids(Path(name, "tokenizer.json"))
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        kwargs = {"trust_remote_code": trust_remote_code, **options}
        tokenizer = AutoTokenizer.from_pretrained(name, **kwargs)
        longest = getattr(tokenizer, "model_max_length", 0)
        if not isinstance(longest, (int, float)):
            raise ValueError(f"model_max_length is {longest!r}")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # also Rust's panics, which are no Exception
        reason = one_line(error, 160)
        raise UserError(f"no tokenizer could be loaded from {name}: {remedy} ({reason})") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    try_tokenizer(tokenizer, name, remedy)
    return tokenizer


def largest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the largest id of its tokens, added ones among them; -1 if it has none."""
    return max(tokenizer.get_vocab().values(), default=-1)


def _check_ids(path: Path) -> None:
    """Raises UserError for an id that no vocabulary has: tokenizers makes room for all below it,
    and ends the process where there is none."""
    try:
        content = json.loads(path.read_bytes())
        vocabulary = content["model"]["vocab"]
        added = [token["id"] for token in content.get("added_tokens") or []]
        ids = [*(vocabulary.values() if isinstance(vocabulary, dict) else ()), *added]
        largest = max(ids, default=0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return  # tokenizers says what is wrong
    if largest > LARGEST_ID:
        raise UserError(f"{path} has a token of id {largest}: give another --tokenizer_name")
