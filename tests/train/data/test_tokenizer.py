from __future__ import annotations

import pytest
from small_tokenizer import small_tokenizer
from transformers import AutoTokenizer

from longctx.errors import UserError
from longctx.train.data.text import tokenizer as tokenizer_module
from longctx.train.data.text.tokenizer import default_tokenizer, load_tokenizer
from longctx.train.options.config import DataArguments, ModelArguments


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def load(cache_dir, **options):
    return load_tokenizer(ModelArguments(**options), DataArguments(cache_dir=str(cache_dir)))


def test_the_default_is_trained_once(cache_dir, capsys):
    first = load(cache_dir, preset="tiny")
    assert "training a tokenizer" in capsys.readouterr().out
    second = load(cache_dir)
    assert capsys.readouterr().out == ""
    assert first.get_vocab() == second.get_vocab()
    assert len(first) == 8192
    code = "def attention(self, query):\n\treturn 'é \U0001f600'\n"
    ids = first(code)["input_ids"]
    assert ids[0] == first.bos_token_id
    assert first.decode(ids[1:]) == code
    assert len({first.bos_token_id, first.eos_token_id, first.pad_token_id}) == 3
    assert first.model_max_length > 10**9
    assert len(code) / len(ids) > 1.5


@pytest.fixture
def few_files(monkeypatch):
    """A tenth of the standard library, which takes a tenth of the time."""
    files = tokenizer_module.stdlib_files()[::10]
    monkeypatch.setattr(tokenizer_module, "stdlib_files", lambda: files)


def test_training_is_deterministic_and_a_corrupt_cache_is_replaced(few_files, tmp_path, capsys):
    default_tokenizer(tmp_path, vocab_size=400)
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    file.write_text(whole[: len(whole) // 2])
    rebuilt = default_tokenizer(tmp_path, vocab_size=400)
    assert "rebuilding the cached tokenizer" in capsys.readouterr().out
    assert file.read_text() == whole and len(rebuilt) == 400
    assert [path.name for path in tmp_path.iterdir()] == [file.name]  # no temporary file stays


def test_it_survives_save_pretrained(tmp_path):
    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": " a"}, {"role": "assistant", "content": "b\n"}]
    assert loaded("x = 1")["input_ids"] == tokenizer("x = 1")["input_ids"]
    assert loaded.apply_chat_template(chat) == tokenizer.apply_chat_template(chat)
    assert loaded.special_tokens_map == tokenizer.special_tokens_map
    assert load(tmp_path / "unused", model_name_or_path=str(tmp_path)).get_vocab()
    assert load(tmp_path / "unused", tokenizer_name=str(tmp_path), preset="tiny").get_vocab()


def test_the_chat_template_marks_assistant_turns():
    tokenizer = small_tokenizer()
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a b"},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
        "<|im_start|>assistant\na b<|im_end|>\n<|im_start|>assistant\n"
    )
    encoded = tokenizer.apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True
    )
    masked = [
        token
        for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        if mask
    ]
    assert tokenizer.decode(masked) == "a b<|im_end|>"


@pytest.mark.parametrize("name", ["./none", "/none/such", "no/such"])
def test_a_tokenizer_that_cannot_be_loaded(tmp_path, name):
    with pytest.raises(UserError, match="--tokenizer_name") as error:
        load(tmp_path, tokenizer_name=name)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_a_model_folder_without_a_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="no tokenizer could be loaded from .*--tokenizer_name"):
        load(tmp_path, model_name_or_path=str(tmp_path))


def test_gguf_files(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="none.gguf does not exist"):
        load(tmp_path, model_name_or_path=str(tmp_path / "none.gguf"))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    calls = []
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda *args, **kwargs: calls.append((args, kwargs))
    )
    load(tmp_path, model_name_or_path=str(tmp_path / "m.gguf"), trust_remote_code=True)
    assert calls == [((str(tmp_path),), {"trust_remote_code": True, "gguf_file": "m.gguf"})]


def test_a_cache_that_cannot_be_written(few_files, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--cache_dir"):
        default_tokenizer(tmp_path / "file" / "cache", vocab_size=300)
