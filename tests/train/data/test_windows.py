"""Windows give the tokens of the whole text: any text, tokenizers of every make."""

from __future__ import annotations

import functools
import multiprocessing
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from freed_memory import give_back_freed_memory
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import small_tokenizer
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from longctx.train.data.reading.records import Document
from longctx.train.data.text import windows
from longctx.train.data.text.encoding import encode
from longctx.train.data.text.windows import tokenise

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "[CLS]", "[SEP]", "<|im_end|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again.  So what?\n",
    "def attention(query, key, value):\n    return softmax(query @ key.T) @ value\n",
    "它跳过了一只懒狗。它跳过了它。 aaaa aaa aaaaaaaa 12345 678 été ﬁne\n\n\n\t\t x\n",
] * 3
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gpt2() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return trained(backend, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def llama3() -> Tokenizer:
    backend = Tokenizer(models.BPE(ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GPT4), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend = trained(backend, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)]),
        ]
    )
    return backend


def llama2() -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend = trained(backend)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    return backend


def gemma() -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return trained(backend)


def metaspace(split: bool, scheme: str) -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    return trained(backend)


def t5() -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 3)]
    )
    return backend


def unigram_without_words() -> Tokenizer:
    backend = t5()
    backend.normalizer = backend.pre_tokenizer = None  # type: ignore[assignment]
    return backend


def bert() -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="<unk>", max_input_chars_per_word=20))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.BertProcessing(("[SEP]", 5), ("[CLS]", 4))
    return backend


def stripped() -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.normalizer = normalizers.Sequence(
        [
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Strip(),
        ]
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return trained(backend, end_of_word_suffix="</w>")


def trained(backend: Tokenizer, **options) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=SPECIAL, show_progress=False, **options
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": gpt2,
    "llama3": llama3,
    "llama2": llama2,
    "gemma": gemma,
    "metaspace first": lambda: metaspace(False, "first"),
    "metaspace always": lambda: metaspace(True, "always"),
    "t5": t5,
    "unigram without words": unigram_without_words,
    "bert": bert,
    "stripped": stripped,
}


@functools.cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=KINDS[kind]())
    stripping = AddedToken("<mask>", lstrip=True, rstrip=True)
    tokenizer.add_tokens([stripping, AddedToken("fox", single_word=True)])
    return tokenizer


@contextmanager
def small_windows(window: int = 96, overlap: int = 48, margin: int = 12) -> Iterator[None]:
    with (
        mock.patch.object(windows, "WINDOW_CHARS", window),
        mock.patch.object(windows, "OVERLAP_CHARS", overlap),
        mock.patch.object(windows, "MARGIN_CHARS", margin),
    ):
        yield


def assert_same(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    with small_windows():
        plain = tokenise(tokenizer, text)
        spanned = tokenise(tokenizer, text, add_special_tokens=False, offsets=True)
    assert plain.ids.dtype == spanned.ids.dtype == np.int32
    assert plain.ids.tolist() == tokenizer(text)["input_ids"]
    assert spanned.ids.tolist() == whole["input_ids"]
    assert list(map(tuple, spanned.offsets.tolist())) == whole["offset_mapping"]


FRAGMENTS = [
    *"aA1 \n\t'\".,@é",
    "  ", "\r\n", " the", " quick", "query", "attention", "fox", " dog's", "été", "12345", "ﬁ",
    "Ａ", "e\u0301", "\u0301", "\u200d", "\xa0", "它跳过了", "一只懒狗。", "\U0001f600",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467", "<mask>", " <mask> ", "<|im_end|>", "<s>", "▁",
    "Σς", "ß", "İ", "\0", "한국어", "    return",
]  # fmt: skip
long_texts = st.lists(
    st.one_of(
        st.sampled_from(FRAGMENTS),
        st.tuples(st.sampled_from(FRAGMENTS), st.integers(2, 120)).map(lambda p: p[0] * p[1]),
        st.text(max_size=8).filter(lambda text: text.isprintable()),
    ),
    max_size=60,
).map("".join)


@pytest.mark.parametrize("kind", KINDS)
def test_any_text_is_tokenised_as_a_whole(kind):
    @settings(max_examples=50, deadline=None)
    @given(long_texts)
    def check(text):
        assert_same(tokenizer_of(kind), text)

    check()


def largest_window(text: str, tokenizer=None) -> int:
    """Tokenises a text; returns the characters of the longest part that was tokenised at once."""
    tokenizer = tokenizer or tokenizer_of("llama3")
    sizes = []
    encode = type(tokenizer).__call__

    def counted(self, texts, **options):
        sizes.extend(map(len, [texts] if isinstance(texts, str) else texts))
        return encode(self, texts, **options)

    with small_windows(), mock.patch.object(type(tokenizer), "__call__", counted):
        tokenise(tokenizer, text, add_special_tokens=False)
    return max(sizes)


def words(count: int) -> str:
    draw = random.Random(0)
    return " ".join(
        draw.choice(["quick", "brown", "fox", "它跳过了", "1234"]) for _ in range(count)
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "unigram without words"])
def test_ordinary_text_is_never_tokenised_at_once(kind):
    assert largest_window(words(2000), tokenizer_of(kind)) <= 2 * 96


def test_a_place_that_cannot_be_cut_costs_a_window_and_not_the_whole(capsys):
    text = words(500) + "a" * 1000 + words(500)
    assert 1000 < largest_window(text) < len(text) // 2
    assert capsys.readouterr().out == ""


def test_a_large_window_is_said_once(monkeypatch, capsys):
    monkeypatch.setattr(windows, "LARGE_CHARS", 1000)
    windows._say_large.cache_clear()
    for _ in range(2):
        text = "".join(random.Random(0).choices("ab", k=5000))
        assert largest_window(text, tokenizer_of("unigram without words")) == 5000
    assert capsys.readouterr().out.count("tokenised at once") == 1


class Own:
    """A pre-tokenizer in Python, which may look anywhere."""

    def pre_tokenize(self, text) -> None:
        pass


@pytest.mark.parametrize(
    "change",
    [
        lambda b: setattr(b.model, "dropout", 0.1),
        lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.PreTokenizer.custom(Own())),
        lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Split(Regex('".*?"'), "isolated")),
        lambda b: setattr(b, "normalizer", normalizers.Replace(Regex("[^#]*#"), "")),
    ],
    ids=["dropout", "own code", "quotes", "comments"],
)
def test_what_sees_far_is_tokenised_at_once(change):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=llama3())
    assert largest_window(words(200), tokenizer) < 200
    change(tokenizer.backend_tokenizer)
    assert largest_window(words(200), tokenizer) == len(words(200))


@pytest.mark.parametrize(
    ("regex", "far"),
    [
        (GPT4, False),
        (r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", False),
        (r"\p{N}{1,3}", False),
        (
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}]?[\p{L}\p{M}]+",
            False,
        ),
        (r"\.+", False),
        (".+", True),
        ('"[^"]*"', True),
        (r"[\s\S]{2,}", True),
        (r"\P{L}*x", True),
    ],
)
def test_patterns_that_run_on(regex, far):
    assert windows._reads_on(regex) is far


def bytes_of_a_token() -> float:
    windows.WINDOW_CHARS, windows.OVERLAP_CHARS, windows.MARGIN_CHARS = 1 << 14, 1 << 11, 1 << 9

    def tokens(count: int) -> int:
        text = "The quick brown fox jumps over it. " * (count // 35)
        document = Document(kind="text", content=text, where="f")
        return len(encode([document], small_tokenizer())[0])

    def peak_bytes() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    tokens(100_000)
    before = peak_bytes()
    count = tokens(1_500_000)
    return (peak_bytes() - before) / count


def test_a_token_takes_at_most_60_bytes():
    """In a process of its own, whose peak begins at what is there when it is forked: memory that
    earlier tests have freed goes back before that, or it would hide what is taken."""
    give_back_freed_memory()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert 0 < pool.apply(bytes_of_a_token) <= 60
