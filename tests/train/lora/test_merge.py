"""Adapters merged: the model that PEFT runs, or one line and nothing written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_tokenizer import small_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from longctx.errors import UserError
from longctx.train import cli
from longctx.train.lora import foreign
from longctx.train.lora.merge import merge
from longctx.train.output import folder as output_folder
from longctx.train.output.manifest import check_files, write_manifest

peft = pytest.importorskip("peft")
IDS = torch.arange(5, 37)[None]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SAFE, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def save_base(folder: Path, seed: int = 0, **changes: Any) -> Path:
    torch.manual_seed(seed)
    settings: dict[str, Any] = dict(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(LlamaConfig(**settings | changes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {
        "whole": save_base(folder / "whole"),
        "tied": save_base(folder / "tied", tie_word_embeddings=True),
        "biased": save_base(folder / "biased", attention_bias=True),
    }


@pytest.fixture(scope="module")
def saved(bases, tmp_path_factory) -> Path:
    """An adapter on all maps of the first base; read only."""
    folder = tmp_path_factory.mktemp("saved") / "adapter"
    save_adapter(bases["whole"], folder)
    return folder


def copy(saved: Path, folder: Path) -> Path:
    return Path(shutil.copytree(saved, folder / "adapter"))


def save_adapter(base: Path, folder: Path, rows: int | None = None, **changes: Any) -> Any:
    """A random adapter, of a run that gave the vocabulary so many `rows`; returns the model that it
    makes, as PEFT runs it."""
    model = AutoModelForCausalLM.from_pretrained(base)
    if rows is not None:
        model.resize_token_embeddings(rows, mean_resizing=False)
    settings = dict(r=4, lora_alpha=8, target_modules=ALL, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings | changes))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    adapted.save_pretrained(folder, save_embedding_layers=rows is not None)
    return adapted.eval()


RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "all maps": ("whole", {}),
    "one map": ("whole", {"target_modules": ["q_proj"]}),
    "all-linear": ("tied", {"target_modules": "all-linear"}),
    "a pattern of names": ("whole", {"target_modules": r".*\.(q|v)_proj"}),
    "all but some": ("whole", {"target_modules": ALL, "exclude_modules": r".*\.0\..*"}),
    "some layers": ("whole", {"layers_to_transform": [1], "layers_pattern": "layers"}),
    "ranks and alphas of their own": (
        "whole",
        {"rank_pattern": {"q_proj": 2, "1.mlp.up_proj": 7}, "alpha_pattern": {"v_proj": 3}},
    ),
    "rslora": ("whole", {"use_rslora": True}),
    "DoRA": ("whole", {"use_dora": True}),
    "pissa": ("whole", {"init_lora_weights": "pissa"}),
    "all biases": ("biased", {"bias": "all"}),
    "the adapters' biases": ("biased", {"bias": "lora_only"}),
    "biases of B": ("biased", {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]}),
    "a head of its own": ("whole", {"modules_to_save": ["lm_head"]}),
    "both ends of their own": ("whole", {"modules_to_save": ["lm_head", "embed_tokens"]}),
    "an adapter on the head": ("whole", {"target_modules": ["lm_head", "q_proj"]}),
    "an adapter on the embedding": ("whole", {"target_modules": ["embed_tokens", "q_proj"]}),
    "tied: a head of its own": ("tied", {"modules_to_save": ["lm_head"]}),
    "tied: an embedding of its own": ("tied", {"modules_to_save": ["embed_tokens"]}),
    "tied: an adapter on the embedding": ("tied", {"target_modules": ["embed_tokens"]}),
    "tied: an adapter on the head": ("tied", {"target_modules": ["lm_head", "o_proj"]}),
    "some tokens": ("whole", {"trainable_token_indices": [1, 5, 7]}),
    "tied: some tokens": ("tied", {"trainable_token_indices": {"embed_tokens": [1, 5, 7]}}),
    "more tokens": ("whole", {"rows": 101}),
    "tied: more tokens": ("tied", {"rows": 101}),
    "more tokens, adapters on the ends": (
        "whole",
        {"rows": 101, "target_modules": ["embed_tokens", "lm_head"]},
    ),
    "more tokens, which alone are trained": (
        "whole",
        {"rows": 101, "trainable_token_indices": [*range(97, 101)]},
    ),
    "a whole MLP of its own": ("whole", {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", RIGHT)
def test_the_merged_model_is_the_one_that_peft_runs(bases, tmp_path: Path, kind: str) -> None:
    base, changes = RIGHT[kind]
    adapted = save_adapter(bases[base], tmp_path / "adapter", **changes)
    before = AutoModelForCausalLM.from_pretrained(bases[base]).eval()(IDS).logits
    truth = adapted(IDS).logits
    assert (truth[..., : before.shape[-1]] - before).abs().max() > 1e-3
    merge(tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(IDS).logits, truth, rtol=1e-4, atol=1e-5)
    assert check_files(tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "merged"]


@pytest.mark.filterwarnings("ignore")
def test_tokens_without_rows_are_refused(bases, tmp_path: Path) -> None:
    """The adapter or its model has to hold the row of each token that a run added; tokens without a
    row that the model's own tokenizer has, as Gemma 3's, are its author's."""
    rows = len(small_tokenizer())
    base = save_base(tmp_path / "base", vocab_size=rows)
    small_tokenizer().save_pretrained(base)
    adapter = tmp_path / "adapter"
    save_adapter(base, adapter)
    tokenizer = small_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(adapter)
    with pytest.raises(UserError, match=f"token {rows}, and neither .* save_embedding_layers=True"):
        merge(adapter, tmp_path / "merged")
    tokenizer.save_pretrained(base)
    merge(adapter, tmp_path / "merged")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("lost", "says"),
    [
        ("lm_head.weight", "101 rows for a vocabulary of 97, but none of lm_head"),
        ("", "trained the row of token 100, and the model has 97 rows"),
    ],
)
def test_ends_without_rows_are_refused(bases, tmp_path: Path, lost: str, says: str) -> None:
    changes = {} if lost else {"trainable_token_indices": [100]}
    save_adapter(bases["whole"], tmp_path / "adapter", rows=101, **changes)
    tensors = load_file(tmp_path / "adapter" / SAFE)
    gone = [n for n in tensors if n.endswith(lost or ".weight") and "lora" not in n]
    for name in gone:
        del tensors[name]
    save_file(tensors, tmp_path / "adapter" / SAFE)
    with pytest.raises(UserError, match=says):
        merge(tmp_path / "adapter", tmp_path / "merged")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_sums_are_rounded_once(bases, tmp_path: Path, dtype: str) -> None:
    """PEFT rounds B A and the sum; here each weight is the fp32 one, rounded."""
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(bases["whole"]).to(torch.bfloat16).save_pretrained(half)
    save_adapter(half, tmp_path / "adapter")
    exact = AutoModelForCausalLM.from_pretrained(half, dtype=torch.float32)
    exact = peft.PeftModel.from_pretrained(exact, tmp_path / "adapter").merge_and_unload()
    merge(tmp_path / "adapter", tmp_path / "merged", dtype=dtype)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    kind = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    for name, weight in exact.state_dict().items():
        assert torch.equal(merged[name], weight.to(kind)), name
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["dtype"] == str(kind).removeprefix("torch.")


Change = Callable[[Path], Any]


def say(**values: Any) -> Change:
    """Other values in the adapter's configuration."""

    def change(folder: Path) -> None:
        path = folder / CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def hold(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Other tensors in the adapter's file."""

    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / SAFE)
        change(tensors)
        save_file(tensors, folder / SAFE)

    return rewrite


def some(tensors: dict[str, Any], part: str) -> str:
    return next(name for name in tensors if part in name)


def write(name: str, data: str | bytes) -> Change:
    return lambda f: (f / name).write_bytes(data.encode() if isinstance(data, str) else data)


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / SAFE), folder / "adapter_model.bin")
    (folder / SAFE).unlink()


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def a_payload(folder: Path) -> None:
    (folder / SAFE).unlink()
    torch.save({"a": Payload(folder.parent / "ran")}, folder / "adapter_model.bin")


def a_bomb(folder: Path) -> None:
    (folder / SAFE).unlink()
    torch.save({"a": torch.zeros(1).expand(10**12)}, folder / "adapter_model.bin")


def remote(name: str, **more: Any) -> Change:
    """A file that names a stranger's code, which lies beside it."""

    def change(folder: Path) -> None:
        (folder / "theirs.py").write_text("import os; os.mkdir(os.environ['RAN'])")
        path = folder / name
        held = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(held | more))

    return change


AUTO = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
HANGS = "(([a-z_.0-9]+)+)+!"
MATCHING = "matching its adapter_config.json to the model's modules does not end within 0 s"
UNKNOWN = "which longctx merge does not know"
HOSTILE: dict[str, tuple[Change, str]] = {
    # what kind of adapter
    **{
        f"peft_type {kind}": (say(peft_type=kind), "and LORA alone is merged here")
        for kind in ("LOHA", "LOKR", "ADALORA", "IA3", "XLORA", "lora", None, 7, ["LORA"])
    },
    "replicated layers": (say(layer_replication=[[0, 2], [1, 2]]), UNKNOWN),
    "many replicated layers": (say(layer_replication=[[0, 10**9]]), UNKNOWN),
    "a module to import": (say(megatron_config={"a": 1}, megatron_core="this"), UNKNOWN),
    "an activated LoRA": (say(alora_invocation_tokens=[1]), UNKNOWN),
    "QALoRA": (say(use_qalora=True), UNKNOWN),
    "something of another PEFT": (say(use_tomorrow=True), UNKNOWN),
    "an unknown beginning": (say(init_lora_weights="pissa_niter_1000000000"), UNKNOWN),
    # numbers
    **{
        f"r {value!r}": (say(r=value), "the rank r must be a whole number of at least 1")
        for value in (0, -1, 2**40, 4.0, "4", True, None, [4])
    },
    "a rank of a million": (say(r=1_000_000), "28 tensors of another shape"),
    "another rank": (say(r=8), "28 tensors of another shape"),
    "a rank of a million in a pattern": (say(rank_pattern={"q_proj": 10**6}), "another shape"),
    "a rank of words in a pattern": (say(rank_pattern={"q_proj": "x"}), "the rank q_proj must"),
    "ranks that are a list": (say(rank_pattern=[1]), "the rank rank_pattern must be"),
    **{
        f"lora_alpha {value!r}": (say(lora_alpha=value), "lora_alpha must be a number above 0")
        for value in (0, -8, float("nan"), float("inf"), 1e300, "8", None, True)
    },
    "a huge alpha": (
        lambda f: (say(lora_alpha=2e9)(f), hold(lambda t: [x.fill_(1e18) for x in t.values()])(f)),
        "NaNs detected|would not be finite",
    ),
    "an alpha of a pattern": (say(alpha_pattern={"q_proj": -1}), "q_proj must be a number above 0"),
    # patterns
    "target_modules hang": (say(target_modules=HANGS), MATCHING),
    "exclude_modules hang": (say(exclude_modules=HANGS), MATCHING),
    "rank_pattern hangs": (say(rank_pattern={HANGS: 4}), MATCHING),
    "alpha_pattern hangs": (say(alpha_pattern={HANGS: 4}), MATCHING),
    "modules_to_save hang": (say(modules_to_save=[HANGS], exclude_modules=["x"]), "merge"),
    "layers_pattern hangs": (say(layers_to_transform=[0], layers_pattern=[HANGS]), MATCHING),
    "no pattern": (say(target_modules="(["), "cannot merge"),
    "targets that are numbers": (say(target_modules=[1]), "cannot merge"),
    "targets that are an object": (say(target_modules={"q_proj": {}}), "cannot merge|tensors"),
    "targets that name nothing": (say(target_modules=["w1"]), "cannot merge"),
    # tensors
    "no tensors": (hold(lambda t: t.clear()), "28 tensors its file lacks"),
    "q_proj alone": (
        hold(lambda t: [t.pop(name) for name in list(t) if "q_proj" not in name]),
        "24 tensors its file lacks",
    ),
    "A without B": (hold(lambda t: t.pop(some(t, "lora_B"))), "1 tensor its file lacks"),
    "more than its targets": (say(target_modules=["q_proj"]), "24 tensors no module of the model"),
    "a tensor too many": (
        hold(lambda t: t.update(extra=torch.zeros(3))),
        r"1 tensor no module of the model takes \(extra\)",
    ),
    "a weight of the base": (
        hold(lambda t: t.update({"base_model.model.model.norm.weight": torch.zeros(32)})),
        "1 tensor no module of the model takes",
    ),
    "another adapter's names": (
        hold(lambda t: [t.update({n.replace("lora_", "hada_"): t.pop(n)}) for n in list(t)]),
        "28 tensors its file lacks",
    ),
    "another shape": (
        hold(lambda t: t.update({some(t, "lora_A"): torch.zeros(4, 31)})),
        "1 tensor of another shape",
    ),
    "A and B exchanged": (
        hold(lambda t: [t.update({n: x.T.contiguous()}) for n, x in list(t.items())]),
        "28 tensors of another shape",
    ),
    "integers": (hold(lambda t: [t.update({n: x.int()}) for n, x in list(t.items())]), "no float"),
    "NaN": (hold(lambda t: t[some(t, "lora_B")].fill_(float("nan"))), "NaNs detected"),
    "infinity": (hold(lambda t: t[some(t, "lora_B")].fill_(float("inf"))), "NaNs detected"),
    "tensors cut": (lambda f: os.truncate(f / SAFE, 2000), "cannot merge"),
    "a header of exabytes": (write(SAFE, b"\xff" * 8 + b"{}"), "cannot merge"),
    "no file of tensors": (lambda f: (f / SAFE).unlink(), "holds no adapter_model.safetensors"),
    "a pickle that runs code": (a_payload, "cannot merge"),
    "a pickle that fills the memory": (a_bomb, "larger than its bytes"),
    # files
    "a configuration that is a pipe": (
        lambda f: ((f / CONFIG).unlink(), os.mkfifo(f / CONFIG)),
        "holds no adapter",
    ),
    "tensors that are a pipe": (
        lambda f: ((f / SAFE).unlink(), os.mkfifo(f / SAFE)),
        "is not a regular file",
    ),
    "tensors that never end": (
        lambda f: ((f / SAFE).unlink(), (f / SAFE).symlink_to("/dev/zero")),
        "is not a regular file",
    ),
    "a tokenizer that is a pipe": (lambda f: os.mkfifo(f / "tokenizer.json"), "not a regular file"),
    "a configuration that is a list": (write(CONFIG, "[]"), "is unreadable .it is no object"),
    "a configuration nested deeply": (write(CONFIG, "[" * 10**5), "is unreadable"),
    "a configuration with a key twice": (
        lambda f: write(CONFIG, (f / CONFIG).read_text().replace("{", '{"r": 4,', 1))(f),
        "it has a key twice",
    ),
    "a flipped bit": (
        lambda f: (write_manifest(f), hold(lambda t: t[some(t, "lora_B")].add_(1))(f)),
        "is damaged .adapter_model.safetensors (is damaged|has)",
    ),
    "a broken tokenizer": (
        lambda f: (write("tokenizer_config.json", "{")(f), write("tokenizer.json", "{")(f)),
        "no tokenizer could be loaded from .*remove its tokenizer's files",
    ),
    "a tokenizer of endless ids": (
        lambda f: (
            small_tokenizer().save_pretrained(f),
            (f / "tokenizer.json").write_text(
                (f / "tokenizer.json").read_text().replace('"id": 0', '"id": 4000000000', 1)
            ),
        ),
        "has a token of id 4000000000",
    ),
    "a broken config.json": (write("config.json", "{"), "its config.json"),
    "a config.json of another type": (
        write("config.json", '{"model_type": "gpt2"}'),
        "was trained over a model of type 'gpt2'",
    ),
    "a rope of words": (
        write("config.json", '{"model_type": "llama", "rope_parameters": "x"}'),
        "config.json|cannot",
    ),
    # a stranger's code
    "code in the adapter's tokenizer": (
        remote(
            "tokenizer_config.json",
            tokenizer_class="Theirs",
            auto_map={"AutoTokenizer": ["theirs.Tokenizer", None]},
        ),
        "no tokenizer could be loaded",
    ),
    "code in the adapter's config.json": (
        remote("config.json", model_type="theirs", auto_map=AUTO),
        "its config.json: .*trust_remote_code|its config.json",
    ),
    "code in the adapter's own": (
        remote(CONFIG, auto_map=AUTO),
        "its auto_map is .*which longctx merge does not know",
    ),
    # its model
    "no model": (say(base_model_name_or_path=None), "does not say which model it is of"),
    "a model that is a number": (say(base_model_name_or_path=7), "give --model"),
    "a missing model": (
        say(base_model_name_or_path="/none\x1b[2J"),
        r"/none\\x1b\[2J is no folder",
    ),
    "its own folder for a model": (
        lambda f: say(base_model_name_or_path=str(f))(f),
        "holds an adapter",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", HOSTILE)
def test_a_strangers_adapter_is_one_line(saved, tmp_path: Path, case: str, monkeypatch) -> None:
    change, says = HOSTILE[case]
    monkeypatch.setattr(foreign, "REHEARSE_S", 0.2 if "hang" in case else 60.0)
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    copy(saved, tmp_path)
    change(tmp_path / "adapter")
    with pytest.raises(UserError, match=says) as error:
        merge(tmp_path / "adapter", tmp_path / "merged")
    assert str(error.value).isprintable() and len(str(error.value)) < 600
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def other(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def lose(part: str) -> Change:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        for name in [name for name in tensors if part in name]:
            del tensors[name]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return change


BASES: dict[str, tuple[Change, str]] = {
    "a layer is missing": (lose("layers.1."), "9 of the model's weights are not in"),
    "a weight is missing": (lose("1.mlp.up_proj"), "1 of the model's weights are not in"),
    "fewer layers": (other(num_hidden_layers=1), "14 tensors no module of the model takes"),
    "more layers": (other(num_hidden_layers=3), "14 tensors its file lacks"),
    "another width": (other(hidden_size=16, head_dim=8), "tensors of another shape"),
    "a million layers": (
        other(num_hidden_layers=10**6),
        "num_hidden_layers 1000000: a whole number from 1 to 512",
    ),
    "quantised": (other(quantization_config={"quant_method": "gptq", "bits": 4}), "is quantised"),
    "an adapter itself": (write(CONFIG, '{"peft_type": "LORA"}'), "holds an adapter"),
    "code of its own": (remote("config.json", model_type="theirs", auto_map=AUTO), "ships code"),
    "weights that are a pipe": (
        lambda f: ((f / "model.safetensors").unlink(), os.mkfifo(f / "model.safetensors")),
        "is not a regular file",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no file named"),
    "not finite": (
        lambda f: (
            lambda t: (
                t["model.norm.weight"].fill_(float("inf")),
                save_file(t, f / "model.safetensors", {"format": "pt"}),
            )
        )(load_file(f / "model.safetensors")),
        "model.norm.weight would not be finite in torch.float32",
    ),
    "integers": (
        lambda f: save_file(
            {n: x.int() for n, x in load_file(f / "model.safetensors").items()},
            f / "model.safetensors",
            {"format": "pt"},
        ),
        "no floating point",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", BASES)
def test_a_strangers_model_is_one_line(
    bases, saved, tmp_path: Path, case: str, monkeypatch
) -> None:
    change, says = BASES[case]
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    base = Path(shutil.copytree(bases["whole"], tmp_path / "base"))
    say(base_model_name_or_path=str(base))(copy(saved, tmp_path))
    change(base)
    with pytest.raises(UserError, match=says) as error:
        merge(tmp_path / "adapter", tmp_path / "merged")
    assert str(error.value).isprintable()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


@pytest.mark.filterwarnings("ignore")
def test_a_repaired_base_and_a_pickled_adapter_are_merged(bases, tmp_path: Path) -> None:
    """transformers would refuse to save the first, after the merge."""
    base = Path(shutil.copytree(bases["whole"], tmp_path / "base"))
    write("generation_config.json", '{"temperature": 0.5, "do_sample": false}')(base)
    truth = save_adapter(base, tmp_path / "adapter")(IDS).logits
    pickled(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(IDS).logits, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_other_weights_than_the_adapters_are_refused(saved, tmp_path: Path) -> None:
    """Where the run that made it says which they were."""
    copy(saved, tmp_path)
    command = ["merge", str(tmp_path / "adapter"), "--output", str(tmp_path / "merged")]
    write_manifest(tmp_path / "adapter", {"base": "xxh3 0"})
    with pytest.raises(UserError, match=r"over other weights .*--allow_changed base"):
        cli.run(command)
    cli.run([*command, "--allow_changed", "base"])
    with pytest.raises(UserError, match="merged exists"):
        cli.run(command)


OUTPUTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "in a file": (lambda f: _touch(f / "file") / "merged", "cannot create .*File exists"),
    "a file": (lambda f: _touch(f / "file"), "exists: give --output a new folder"),
    "an empty folder": (lambda f: f, "exists: give --output a new folder"),
    "a link to nothing": (lambda f: _link(f / "link"), "exists: give --output a new folder"),
    "a name too long": (lambda f: f / ("x" * 300), "cannot create .*File name too long"),
    "in a folder of the kernel": (lambda f: Path("/proc/merged"), "cannot create /proc/merged"),
}


def _touch(path: Path) -> Path:
    path.touch()
    return path


def _link(path: Path) -> Path:
    path.symlink_to("nowhere")
    return path


@pytest.mark.parametrize("case", OUTPUTS)
def test_a_place_that_cannot_be_written(saved, tmp_path: Path, case: str) -> None:
    place, says = OUTPUTS[case]
    copy(saved, tmp_path)
    with pytest.raises(UserError, match=says):
        merge(tmp_path / "adapter", place(tmp_path))
    assert not list(tmp_path.rglob(".incomplete*"))


@pytest.mark.filterwarnings("ignore")
def test_of_two_merges_into_one_folder_one_wins(saved, tmp_path: Path) -> None:
    """A killed one stands in nobody's way, and neither does what was planted in its place."""
    copy(saved, tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".incomplete-merged").symlink_to("elsewhere")
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        with output_folder.claimed(tmp_path / "merged") as staged:
            staged.mkdir()
            (staged / "config.json").write_text("{}")
            os.write(writer, b"x")
            time.sleep(60)
        os._exit(1)
    assert os.read(reader, 1) == b"x"
    with pytest.raises(UserError, match=f"in use by process {pid} .* another --output$"):
        merge(tmp_path / "adapter", tmp_path / "merged")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    merge(tmp_path / "adapter", tmp_path / "merged")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "elsewhere", "merged"]
    assert not list((tmp_path / "elsewhere").iterdir()) and check_files(tmp_path / "merged")


@pytest.mark.filterwarnings("ignore")
def test_a_folder_that_came_meanwhile_stays(saved, tmp_path: Path, monkeypatch) -> None:
    copy(saved, tmp_path)

    def come(*args: Any) -> None:
        (tmp_path / "merged").mkdir()
        (tmp_path / "merged" / "mine").touch()

    monkeypatch.setattr("longctx.train.lora.merge.require_space", come)
    with pytest.raises(UserError, match="merged could not be written: Directory not empty"):
        merge(tmp_path / "adapter", tmp_path / "merged")
    assert [path.name for path in (tmp_path / "merged").iterdir()] == ["mine"]
    assert not list(tmp_path.glob(".incomplete*"))


@pytest.mark.filterwarnings("ignore")
def test_a_full_disk_leaves_nothing(saved, tmp_path: Path, monkeypatch) -> None:
    copy(saved, tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(UserError, match="merged could not be written: 0.00 GiB free"):
        merge(tmp_path / "adapter", tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
