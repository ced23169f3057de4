"""profiling/bench/peers.py: a peer's settings change what is kept, and no gradient."""

from __future__ import annotations

import copy
import json
from functools import partial
from typing import Any

import pytest
import torch
from small_families import family_config
from small_model import packed_batch, tiny_config
from small_tokenizer import small_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from longctx.attention.documents import Documents
from longctx.train.commands import train
from profiling.bench import layer_bench, peers, step_bench, train_bench
from profiling.bench.runner import case_text, parse_case

pytestmark = pytest.mark.usefixtures("reference_kernels")

LAYERS = 4
SETTINGS = [
    (checkpointing, offload) for checkpointing in peers.CHECKPOINTING for offload in ("none", "all")
]


def peer(checkpointing: str, offload: str, backend: str = "fa4") -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = tiny_config(num_hidden_layers=LAYERS)
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    case = dict(class_type="vanilla", backend=backend, checkpointing=checkpointing, offload=offload)
    peers.prepare_peer(model, case)
    return model.train()


def gradients(model: LlamaForCausalLM, passes: int = 1) -> dict[str, Tensor]:
    for _ in range(passes):
        model(**packed_batch()).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every attention that really ran on the CPU."""
    ran: list[str] = []
    choose = peers.choose_attention

    def run(kind: str, function: Any, *inputs: Any) -> Any:
        ran.append(kind)
        return function(*inputs)

    def chosen(*args: Any) -> Any:
        name, attention = choose(*args)
        counted = copy.copy(attention)
        for kind in ("forward", "backward"):
            setattr(counted, kind, partial(run, kind, getattr(attention, kind)))
        return name, counted

    monkeypatch.setattr(peers, "choose_attention", chosen)
    return ran


@pytest.mark.parametrize("backend", ["fa4", "sdpa"])
@pytest.mark.parametrize(("checkpointing", "offload"), SETTINGS)
def test_gradients_are_those_without_checkpointing(checkpointing, offload, backend) -> None:
    """Twice, as with accumulation: a second forward pass begins with nothing of the first."""
    plain = gradients(peer("none", "none", backend), passes=2)
    found = gradients(peer(checkpointing, offload, backend), passes=2)
    assert plain.keys() == found.keys() and len(plain) == LAYERS * 9 + 3
    for name in plain:
        assert torch.equal(plain[name], found[name]), name


@pytest.mark.parametrize("family", ["mistral", "qwen2-windows", "phi3-windows", "qwen3"])
def test_windows_are_the_models(family) -> None:
    """transformers' sdpa, over masks, is the truth."""
    inputs = {name: x % 211 if name == "input_ids" else x for name, x in packed_batch().items()}
    inputs["labels"] = inputs["input_ids"]
    inputs["position_ids"] = torch.arange(48).repeat(2, 1)  # longer than the window
    found = []
    for backend in ("sdpa", "fa4"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(family_config(family), attn_implementation="sdpa")
        settings = dict(checkpointing="none", offload="none")
        peers.prepare_peer(model, dict(class_type="vanilla", backend=backend, **settings))
        model.train()(**inputs).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for truth, grad in zip(*found, strict=True):
        torch.testing.assert_close(grad, truth, rtol=1e-4, atol=1e-6)


def test_attention_is_by_documents() -> None:
    """transformers' own, over a mask, is the truth."""
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(
        tiny_config(num_hidden_layers=LAYERS), attn_implementation="eager"
    ).train()
    batch = packed_batch()
    same = batch["position_ids"].eq(0).cumsum(1)
    allowed = (same[:, :, None] == same[:, None, :]).tril()[:, None]  # (B, 1, S, S)
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    model(**batch, attention_mask=mask).loss.backward()
    found = gradients(peer("none", "none"))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("checkpointing", "offload"), SETTINGS)
def test_attention_runs_forward_once_where_its_output_is_kept(
    checkpointing, offload, launched
) -> None:
    gradients(peer(checkpointing, offload))
    again = checkpointing == "layers"
    assert launched.count("forward") == LAYERS * (2 if again else 1)
    assert launched.count("backward") == LAYERS


def test_bounds_are_read_once_a_step_and_the_longest_is_an_int(monkeypatch) -> None:
    seen: list[tuple[Tensor, int]] = []
    read: list[Tensor] = []

    def attention(*args: Any, **kwargs: Any) -> Any:
        seen.append((kwargs["cu_seq_lens_q"], kwargs["max_length_q"]))
        return document_attention(*args, **kwargs)

    def documents(position_ids: Tensor) -> Documents:
        read.append(position_ids)
        return from_position_ids(position_ids)

    document_attention = peers.document_attention
    from_position_ids = Documents.from_position_ids
    monkeypatch.setattr(peers, "document_attention", attention)
    monkeypatch.setattr(Documents, "from_position_ids", documents)
    model = peer("layers", "none")
    gradients(model)
    monkeypatch.undo()
    peers.attend_by_documents(model)  # transformers holds on to the last that was registered
    assert len(read) == 1 and len(seen) == 2 * LAYERS
    for bounds, longest in seen:
        assert bounds.tolist() == [0, 20, 47, 48, 68, 95, 96] and type(longest) is int
        assert bounds.dtype == torch.int32 and longest == 27


@pytest.mark.parametrize(("checkpointing", "tensors"), [("layers", 1), ("selective", 2)])
def test_what_layers_keep_goes_to_the_host(checkpointing, tensors, monkeypatch) -> None:
    """A layer's input, of `selective` attention's output and lse: 2 rows of 48 tokens, in fp32."""
    hosts: list[peers.Host] = []

    class Watched(peers.Host):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            hosts.append(self)

    monkeypatch.setattr(peers, "Host", Watched)
    model = peer(checkpointing, "all")
    loss = model(**packed_batch()).loss
    (host,) = hosts
    lse_bytes = 96 * 4 * 4 if checkpointing == "selective" else 0
    assert host.copied_bytes == LAYERS * (tensors * 96 * 64 * 4 + lse_bytes)
    kept, waiting = host.newest, []
    while kept:
        waiting.append(kept.on_gpu is None)
        assert len(kept.on_host) == tensors + (lse_bytes > 0)
        kept = kept.before
    assert waiting == [False, False, True, True]  # from the last to the first
    loss.backward()
    assert host.newest is None and host.copied_bytes == LAYERS * (tensors * 96 * 64 * 4 + lse_bytes)


def test_a_layer_that_keeps_everything_copies_no_weight_and_nothing_twice(monkeypatch) -> None:
    copies: list[Tensor] = []
    copy_out = peers.Kept._copy_out

    def watched(self: peers.Kept, x: Tensor) -> None:
        copies.append(x)
        copy_out(self, x)

    monkeypatch.setattr(peers.Kept, "_copy_out", watched)
    model = peer("none", "all")
    gradients(model)
    weights = {p.data_ptr() for p in model.parameters()}
    assert copies and not {x.data_ptr() for x in copies} & weights
    assert all(x.nbytes >= peers.LEAST_BYTES for x in copies)
    shared = [x for x in copies[: len(copies) // LAYERS] if x.shape[-1] == 64 and x.dim() > 1]
    assert len(shared) == len({(x.data_ptr(), x.shape, x.stride()) for x in shared})


def test_cases_say_their_settings() -> None:
    for bench in (layer_bench, step_bench, train_bench):
        defaults = bench.DEFAULTS
        case = parse_case("class_type=liger,checkpointing=none,offload=none", defaults)
        assert (case["checkpointing"], case["offload"]) == ("none", "none")
        whole = peers.settled({**defaults, **case})
        text = case_text(whole, defaults)
        assert peers.settled({**defaults, **parse_case(text, defaults)}) == whole
        default = peers.settled({**defaults, "class_type": "vanilla"})
        assert default["checkpointing"] == "layers"
        assert peers.settled(defaults)["checkpointing"] is None
    for text in ("class_type=liger,checkpointing=all", "checkpointing=layers"):
        with pytest.raises(SystemExit, match="checkpointing="):
            peers.settled({**defaults, **parse_case(text, defaults)})


def test_published_cases_are_settled_and_differ() -> None:
    cases = [*layer_bench.BENCH.cases("h200"), *train_bench.BENCH.cases(None)]
    for name in ("h200", "h200_x2", "lora", "longest"):
        cases += step_bench.BENCH.cases(name)
    texts = [json.dumps(case, sort_keys=True) for case in cases]
    assert len(texts) == len(set(texts))
    for case in cases:
        assert (case["checkpointing"] is None) == (case["class_type"] == "custom")
        assert case["class_type"] == "custom" or case["backend"] == "fa4"


@pytest.mark.parametrize("checkpointing", peers.CHECKPOINTING)
def test_step_bench_measures_a_peer(checkpointing) -> None:
    case = {
        **step_bench.DEFAULTS,
        **dict(class_type="vanilla", engine="plain", gpus=0, tokens=64, layers=2, preset="tiny"),
        **dict(checkpointing=checkpointing, states="as_weights"),
    }
    (row,) = step_bench.run_case(case, 1, ["--use_cpu"])
    assert row["status"] == "ok" and row["checkpointing"] == checkpointing
    assert (row["offload"], row["backend"]) == ("all", "auto")


@pytest.mark.parametrize(
    ("class_type", "text"),
    [
        ("custom", "lora=2"),
        ("custom", "lora=2,quantize=nf4,place=host"),
        ("any", "lora=2"),
        ("vanilla", "lora=2"),
        ("vanilla", "lora=2,quantize=nf4"),
    ],
)
def test_step_bench_measures_adapters(class_type, text) -> None:
    """Under a peer's checkpointing and offloading too."""
    if "nf4" in text:
        pytest.importorskip("bitsandbytes")
    fixed = dict(class_type=class_type, engine="plain", gpus=0, tokens=64, layers=2, preset="tiny")
    given = parse_case(text, step_bench.DEFAULTS)
    case = step_bench.BENCH.case({**fixed, **given})
    (row,) = step_bench.run_case(case, 1, ["--use_cpu", "--dtype", "bfloat16"])
    assert row["status"] == "ok" and row["lora"] == 2
    assert row.get("quantize", "none") == case["quantize"]
    assert "mfu" not in row


def test_train_bench_trains_a_peer(tmp_path, monkeypatch) -> None:
    """By train.py's own main."""
    settings = dict(class_type="vanilla", checkpointing="selective", backend="sdpa", offload="all")
    case = train_bench.BENCH.case(settings)
    small_tokenizer().save_pretrained(tmp_path / "tokenizer")
    flags = ["--use_cpu", "--max_steps", "2", "--seq_len", "64", "--preset", "tiny"]
    flags += ["--tokenizer_name", str(tmp_path / "tokenizer")]
    (tmp_path / "text.txt").write_text("eight words that train a model of two layers. " * 500)
    flags += ["--train_file", str(tmp_path / "text.txt"), "--cache_dir", str(tmp_path / "cache")]
    monkeypatch.setattr(train_bench, "JOB", [])
    monkeypatch.setattr(train, "load_model", train.load_model)  # undone after
    rows = train_bench.run_case(case, 1, flags)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["checkpointing"] == "selective" and row["offload"] == "all" for row in rows)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_on_a_gpu_offloading_changes_no_bit_and_frees_memory(deterministic) -> None:
    """Six layers of 1024 over documents of 8192 tokens in all; at most two layers' tensors stay."""
    pytest.importorskip("flash_attn.cute")
    config = tiny_config(
        num_hidden_layers=6,
        hidden_size=1024,
        intermediate_size=2048,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=8192,
    )
    position_ids = torch.cat([torch.arange(n) for n in (5000, 1, 3191)])[None].cuda()
    ids = torch.randint(331, position_ids.shape, device="cuda")
    found, held = {}, {}
    for checkpointing, offload in SETTINGS:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).train()
        case = dict(class_type="vanilla", backend="fa4")
        case |= dict(checkpointing=checkpointing, offload=offload)
        peers.prepare_peer(model, case)
        for _ in range(3):  # the second and third reuse the host's memory and the GPU's
            model.zero_grad()
            before = torch.cuda.memory_allocated()
            loss = model(input_ids=ids, labels=ids, position_ids=position_ids).loss
            held[checkpointing, offload] = torch.cuda.memory_allocated() - before
            loss.backward()
        found[checkpointing, offload] = [p.grad.clone() for p in model.parameters()]
    for grads in found.values():
        assert all(map(torch.equal, grads, found["none", "none"]))
    unit = ids.numel() * 1024 * 2  # T*D*2 bytes
    for checkpointing, units in (("layers", 1), ("selective", 2), ("none", 8)):
        freed = held[checkpointing, "none"] - held[checkpointing, "all"]
        assert freed > 3 * units * unit, checkpointing
