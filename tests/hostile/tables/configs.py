"""config.json, generation_config.json, tokenizer files: a model's small files, from strangers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hostile.cases import fails, table, works
from hostile.files import Make, cut, edit, empty, in_file, model, remove, write

BROKEN = "cannot load a model from .*broken"
TOKENIZER = "no tokenizer could be loaded from .*broken"

CONFIG: dict[str, tuple[dict[str, Any], object]] = {
    "no architecture": ({"model_type": ...}, fails(BROKEN)),
    "an unknown architecture": ({"model_type": "none"}, fails(BROKEN + ".*model type `none`")),
    "an architecture of null": ({"model_type": None}, fails(BROKEN)),
    "an architecture of a list": ({"model_type": []}, fails(BROKEN)),
    "an encoder": ({"model_type": "bert"}, fails("class_type custom|bert")),
    "a vision model": ({"model_type": "vit"}, fails("vit")),
    "a path for an architecture": ({"model_type": "../../x"}, fails(BROKEN)),
    "an architecture of a megabyte": ({"model_type": "x" * 10**6}, fails(BROKEN)),
    "no heads": ({"num_attention_heads": 0}, fails(BROKEN + ".* by zero")),
    "negative heads": ({"num_attention_heads": -4}, fails("broken")),
    "heads of words": (
        {"num_attention_heads": "many"},
        fails("'num_attention_heads' expected int"),
    ),
    "heads of null": ({"num_attention_heads": None}, fails("broken")),
    "too many heads": ({"num_attention_heads": 64}, fails("broken")),
    "heads that do not divide": ({"num_key_value_heads": 3}, fails(r"k_proj\.weight \(16, 32\)")),
    "no key heads": ({"num_key_value_heads": 0}, fails("broken")),
    "a head of no size": ({"head_dim": 0}, fails("broken")),
    "a head of odd size": ({"head_dim": 7}, fails("broken")),
    "a head of fractions": ({"head_dim": 8.5}, fails("broken.*head_dim")),
    "no layers": ({"num_hidden_layers": 0}, fails("has num_hidden_layers (0|-1)")),
    "negative layers": ({"num_hidden_layers": -1}, fails("has num_hidden_layers (0|-1)")),
    "a layer more": ({"num_hidden_layers": 3}, fails("9 of the model's weights are not in")),
    "a layer less": ({"num_hidden_layers": 1}, fails("9 of the tensors in .* are read by nobody")),
    "a million layers": ({"num_hidden_layers": 10**6}, fails("broken|space")),
    "layers of words": ({"num_hidden_layers": "many"}, fails("'num_hidden_layers' expected int")),
    "no width": ({"hidden_size": 0}, fails("broken")),
    "a negative width": ({"hidden_size": -32}, fails("broken")),
    "a width of words": ({"hidden_size": "big"}, fails(BROKEN + ".*'hidden_size' expected int")),
    "a width of exabytes": ({"hidden_size": 2**40}, fails("broken|space")),
    "another width": ({"hidden_size": 64}, fails("another shape")),
    "another inner width": ({"intermediate_size": 128}, fails("another shape")),
    "no inner width": ({"intermediate_size": 0}, fails("broken")),
    "no vocabulary": ({"vocab_size": 0}, fails("broken|vocabulary")),
    "a smaller vocabulary": ({"vocab_size": 100}, fails("vocabulary has 100|another shape")),
    "a larger vocabulary": ({"vocab_size": 5000}, fails("another shape")),
    "a negative vocabulary": ({"vocab_size": -1}, fails("broken|vocabulary")),
    "no positions": ({"max_position_embeddings": 0}, fails("max_position_embeddings 0")),
    "positions of null": ({"max_position_embeddings": None}, fails("max_position_embeddings")),
    "positions of words": ({"max_position_embeddings": "4k"}, fails("max_position_embeddings")),
    "few positions": ({"max_position_embeddings": 32}, fails("max_position_embeddings 32")),
    "an epsilon of zero": ({"rms_norm_eps": 0.0}, works()),
    "an epsilon of NaN": ({"rms_norm_eps": float("nan")}, fails("rms_norm_eps|not finite")),
    "a negative epsilon": ({"rms_norm_eps": -1.0}, fails("rms_norm_eps|not finite")),
    "an epsilon of words": ({"rms_norm_eps": "small"}, fails("rms_norm_eps")),
    "an unknown activation": ({"hidden_act": "nonsense"}, fails("nonsense")),
    "another activation": ({"hidden_act": "gelu"}, works()),
    "an activation of code": (
        {"hidden_act": "__import__('os').mkdir('ran')"},
        fails("broken|hidden"),
    ),
    "an unknown RoPE": ({"rope_parameters": {"rope_type": "spiral"}}, fails("spiral")),
    "a RoPE of no base": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
        fails("rope|finite"),
    ),
    "a RoPE of a negative base": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}},
        fails("rope|finite"),
    ),
    "a RoPE of words": ({"rope_parameters": "linear"}, fails("broken|rope")),
    "a RoPE of a list": ({"rope_parameters": [1]}, fails("broken|rope")),
    "a linear RoPE without factor": (
        {"rope_parameters": {"rope_type": "linear"}},
        fails("rope|factor"),
    ),
    "a linear RoPE of factor 0": (
        {"rope_parameters": {"rope_type": "linear", "factor": 0.0, "rope_theta": 1e4}},
        fails("not finite"),
    ),
    "a YaRN of words": (
        {"rope_parameters": {"rope_type": "yarn", "factor": "two", "rope_theta": 1e4}},
        fails("broken"),
    ),
    "attention dropout of 2": (
        {"attention_dropout": 2.0},
        fails("config.json drops 2.0 of attention"),
    ),
    "attention dropout": ({"attention_dropout": 0.1}, works("dropout")),
    "ties of words": ({"tie_word_embeddings": "perhaps"}, fails("tie_word_embeddings")),
    "untied": ({"tie_word_embeddings": False}, fails("lm_head.weight")),
    "biases": ({"attention_bias": True}, fails("are not in .*bias")),
    "output_attentions": ({"output_attentions": True}, works()),
    "output_hidden_states": ({"output_hidden_states": True}, works()),
    "no return_dict": ({"return_dict": False}, works()),
    "use_cache": ({"use_cache": True}, works()),
    "pretraining_tp": ({"pretraining_tp": 4}, works()),
    "a dtype of nobody": ({"dtype": "float7"}, fails("float7|dtype")),
    "a dtype of code": ({"torch_dtype": "os.system"}, works()),
    "an attention of nobody": ({"_attn_implementation": "nonsense"}, works()),
    "ids beyond the vocabulary": ({"eos_token_id": 10**9, "bos_token_id": -7}, works()),
    "ids of words": ({"eos_token_id": "</s>"}, fails("eos_token_id")),
    "a list of ends": ({"eos_token_id": [1, 2]}, works()),
    "a chunk size": ({"chunk_size_feed_forward": 7}, works()),
    "labels by the thousand": ({"id2label": {str(i): "x" for i in range(5000)}}, works()),
    "keys of nobody": ({"nonsense": {"a": [1, 2]}, "x" * 5000: 1}, works()),
    "keys of methods": ({"to_dict": 1}, fails("to_dict|broken")),
    "keys of Python": ({"__class__": "x"}, fails("__class__|broken")),
    "code of its own": (
        {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}},
        fails("code of its own"),
    ),
    "code of another": (
        {"auto_map": {"AutoModelForCausalLM": "nobody/code--mine.Model"}},
        works(),
    ),
    "a kernel of a stranger's": (
        {"attn_implementation": "evil/kernel"},
        works("patched: 2 scheduled"),
    ),
    "experts of a stranger's": ({"experts_implementation": "kernels-community/moe"}, works()),
    "tensors over two GPUs": ({"distributed_config": {"tp_size": 2}}, works()),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, fails("is quantised .gptq.")),
    "a name of markup": ({"_name_or_path": "<script>alert(1)</script>"}, works()),
    "a version from the future": ({"transformers_version": "99.0"}, works()),
    **{
        f"architectures of {what}": (
            {"architectures": value},
            fails("broken: its config.json has architectures .*a list of names"),
        )
        for what, value in {
            "a number": 7,
            "a truth": True,
            "a word": "LlamaForCausalLM",
            "numbers": [7],
            "null": [None],
            "a mapping": {"a": 1},
        }.items()
    },
    "no name of an architecture": ({"architectures": []}, works()),
    "architectures of nothing": ({"architectures": None}, works()),
}

GENERATION: dict[str, tuple[Any, object]] = {
    "temperature without sampling": ({"temperature": 0.5}, works("generation_config|generation")),
    "a negative temperature": ({"temperature": -1.0, "do_sample": True}, works("generation")),
    "top_p of 5": ({"top_p": 5.0, "do_sample": True}, works("generation")),
    "beams without end": ({"num_beams": 10**9}, works()),
    "three sequences of one": ({"num_return_sequences": 3}, works("generation")),
    "an unknown cache": ({"cache_implementation": "nonsense"}, works("generation")),
    "negative new tokens": ({"max_new_tokens": -5}, works("generation")),
    "new tokens of words": ({"max_new_tokens": "many"}, works("generation")),
    "a max_length of 1": ({"max_length": 1}, works()),
    "a watermark of nobody": ({"watermarking_config": {"nonsense": 1}}, works("generation")),
    "a compile of nobody": ({"compile_config": {"backend": "nonsense"}}, works()),
    "early stopping of words": ({"early_stopping": "perhaps"}, works("generation")),
    "unknown keys": ({"nonsense": 1}, works()),
    "scores without a dictionary": ({"output_scores": True}, works("generation")),
    "beams' penalties without beams": ({"length_penalty": 2.0}, works("generation")),
    "an empty object": ({}, works()),
    "a list": ([], works("its generation_config.json is left out")),
    "null": (None, works("its generation_config.json is left out")),
}


def raw(name: str, data: str | bytes) -> Make:
    return model(write(name, data))


def own_code(folder: Path) -> None:
    edit("config.json", model_type="mine", auto_map={"AutoConfig": "mine.Config"})(folder)
    (folder / "mine.py").write_text(f"open({str(folder.parent / 'ran')!r}, 'w')\n")


def tokenizer(**changes: Any) -> Make:
    return model(edit("tokenizer_config.json", **changes))


def backend(**changes: Any) -> Make:
    return model(edit("tokenizer.json", **changes))


def replaces(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


FILES = {
    "a kernel of a stranger's for Hugging Face's code": (
        model(edit("config.json", attn_implementation="evil/kernel"), "--class_type", "vanilla"),
        works("nothing patched; sdpa attention"),
    ),
    "half a config": (model(cut("config.json")), fails("config.json' is not a valid JSON file")),
    "an empty config": (model(in_file("config.json", empty)), fails(BROKEN)),
    "no config": (model(remove("config.json")), fails("broken")),
    "a config that is a list": (
        raw("config.json", "[]"),
        fails(BROKEN),
    ),
    "a config that is null": (raw("config.json", "null"), fails("broken.* 'NoneType'")),
    "a config that is a number": (raw("config.json", "17"), fails("broken")),
    "a config of words": (raw("config.json", '"llama"'), fails("broken")),
    "an empty object": (raw("config.json", "{}"), fails("broken")),
    "a config in Latin-1": (raw("config.json", '{"a": "é"}'.encode("latin-1")), fails("broken")),
    "a binary config": (raw("config.json", bytes(range(256))), fails("broken")),
    "a config nested too deeply": (raw("config.json", '{"a":' * 99_999), fails("broken")),
    "a huge number": (raw("config.json", '{"hidden_size": ' + "9" * 9999 + "}"), fails("broken")),
    "a pickled config": (raw("config.json", b"\x80\x04cos\nmkdir\n."), fails("broken")),
    "a model with code of its own": (
        model(own_code),
        fails("code of its own, which runs with --trust_remote_code alone"),
    ),
    "half a generation config": (model(cut("generation_config.json")), works()),
    "a binary generation config": (
        raw("generation_config.json", b"\xff\xfe"),
        works(),
    ),
    "no generation config": (model(remove("generation_config.json")), works()),
    # the tokenizer
    "half a tokenizer": (model(cut("tokenizer.json")), fails(TOKENIZER)),
    "an empty tokenizer": (model(in_file("tokenizer.json", empty)), fails(TOKENIZER)),
    "no tokenizer": (model(remove("tokenizer.json")), fails("tokenizer .*broken")),
    "a tokenizer that is a list": (raw("tokenizer.json", "[]"), fails(TOKENIZER)),
    "a tokenizer that is null": (raw("tokenizer.json", "null"), fails(TOKENIZER)),
    "a tokenizer of nothing": (raw("tokenizer.json", "{}"), fails(TOKENIZER)),
    "a tokenizer without a model": (backend(model=...), fails(TOKENIZER)),
    "a tokenizer of an unknown model": (backend(model={"type": "Magic"}), fails(TOKENIZER)),
    "a tokenizer of no tokens": (
        backend(model={"type": "BPE", "vocab": {}, "merges": []}),
        fails("broken|token"),
    ),
    "merges of unknown tokens": (
        backend(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}),
        fails(TOKENIZER),
    ),
    "ids with holes": (
        backend(model={"type": "BPE", "vocab": {"a": 0, "b": 10**9}, "merges": []}),
        fails("vocabulary|broken|token"),
    ),
    "negative ids": (
        backend(model={"type": "BPE", "vocab": {"a": -1}, "merges": []}),
        fails(TOKENIZER),
    ),
    "an unknown normalizer": (backend(normalizer={"type": "Magic"}), fails(TOKENIZER)),
    "a normalizer that deletes all": (
        backend(normalizer={"type": "Replace", "pattern": {"Regex": "."}, "content": ""}),
        fails("makes no token of this text"),
    ),
    "a normalizer that backtracks": (
        backend(normalizer={"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": ""}),
        works(),
    ),
    "an unknown splitter": (backend(pre_tokenizer={"type": "Magic"}), fails(TOKENIZER)),
    "an unknown decoder": (backend(decoder={"type": "Magic"}), fails(TOKENIZER)),
    "a processor of unknown tokens": (
        backend(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        ),
        fails("the tokenizer is damaged|no tokenizer could be loaded"),
    ),
    "added tokens of words": (backend(added_tokens="many"), fails(TOKENIZER)),
    "truncation that cuts all": (
        backend(
            truncation={
                "direction": "Right",
                "max_length": 1,
                "strategy": "LongestFirst",
                "stride": 0,
            }
        ),
        works("12 documents"),
    ),
    "half a tokenizer config": (model(cut("tokenizer_config.json")), fails(TOKENIZER)),
    "a tokenizer config that is a list": (raw("tokenizer_config.json", "[]"), fails(TOKENIZER)),
    "a tokenizer config that is null": (raw("tokenizer_config.json", "null"), fails(TOKENIZER)),
    "an unknown tokenizer class": (tokenizer(tokenizer_class="Nonsense"), works()),
    "a tokenizer class of code": (tokenizer(tokenizer_class="os.system"), works()),
    "a tokenizer with code of its own": (
        tokenizer(auto_map={"AutoTokenizer": ["mine.Tokenizer", None]}, tokenizer_class="Mine"),
        fails("broken|code"),
    ),
    "no end token": (tokenizer(eos_token=None), works()),
    "an end token that is none": (tokenizer(eos_token="</nothing>"), fails("vocabulary|token")),
    "an end token of a list": (tokenizer(eos_token=["a"]), fails(TOKENIZER)),
    "an end token of a number": (tokenizer(eos_token=7), fails(TOKENIZER)),
    "an empty end token": (tokenizer(eos_token=""), works()),
    "no pad token": (tokenizer(pad_token=None), works()),
    "a model_max_length of 1": (tokenizer(model_max_length=1), works("12 documents")),
    "a model_max_length of words": (tokenizer(model_max_length="long"), fails(TOKENIZER)),
    "padding on the left": (tokenizer(padding_side="left"), works()),
    "padding nowhere": (tokenizer(padding_side="up"), fails(TOKENIZER)),
    "a thousand extra tokens": (
        tokenizer(extra_special_tokens={f"t{i}": f"<t{i}>" for i in range(1000)}),
        works(),
    ),
    "special tokens of a list": (raw("special_tokens_map.json", "[]"), fails(TOKENIZER)),
    "added tokens of a list": (raw("added_tokens.json", "[]"), fails(TOKENIZER)),
    **{
        f"a tokenizer that {what}": (backend(**parts), fails(says))
        for what, (parts, says) in {
            "makes a thousand of each letter": (
                {"normalizer": replaces("[a-z]", "x" * 1000)},
                "the tokenizer of .*broken makes .* characters of",
            ),
            "makes a thousand of a rare letter": (
                {"normalizer": replaces("\u1234", "x" * 1000)},
                "the tokenizer of .*broken makes .* characters of",
            ),
            "doubles nine times": (
                {"normalizer": {"type": "Sequence", "normalizers": [replaces(".", "xx")] * 9}},
                "the tokenizer of .*broken makes .* characters of",
            ),
            "doubles forty times": (
                {"normalizer": {"type": "Sequence", "normalizers": [replaces(".", "xx")] * 40}},
                "the tokenizer of .*broken (was killed|takes more than)",
            ),
            "begins with a megabyte": (
                {"normalizer": {"type": "Prepend", "prepend": "x" * 10**6}},
                "the tokenizer of .*broken makes .* characters of",
            ),
            "knows no other word": (
                {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}},
                "the tokenizer is damaged .*give another --tokenizer_name",
            ),
            "knows no other piece": (
                {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None}},
                "the tokenizer is damaged .*give another --tokenizer_name",
            ),
        }.items()
    },
}

CASES = [
    *table(
        "configs",
        {
            name: (model(edit("config.json", **changes)), end)
            for name, (changes, end) in CONFIG.items()
        },
    ),
    *table(
        "generation configs",
        {
            name: (model(write("generation_config.json", json.dumps(said))), end)
            for name, (said, end) in GENERATION.items()
        },
    ),
    *table("small files", FILES),
]
