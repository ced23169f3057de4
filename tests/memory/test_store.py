"""The activation store on a GPU: copies beside compute change nothing, the slab is page-locked.

Its logic under stress (random lengths, dropped graphs, poisoned buffers) is tested on the CPU, in
tests/layer/test_schedule.py.
"""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from cost_sizes import keep_of
from small_layer import every_kth
from transformers import LlamaForCausalLM

from exactness import DEVICE
from longctx.cost.kept import Keep
from longctx.errors import UserError
from longctx.memory.slab import PinnedSlab
from longctx.memory.store import ActivationStore
from longctx.patching.patch import patch_as, unpatch
from longctx.settings import PatchOptions
from longctx.train.options.config import ModelArguments
from longctx.train.start.loading import load_config
from profiling.bench.slab_bench import fork

CPU = torch.device("cpu")


def test_a_slab_has_exactly_its_size() -> None:
    assert PinnedSlab(1_000_003, CPU).data.untyped_storage().nbytes() == 1_000_003


def test_a_slab_grows_only_when_it_must() -> None:
    store = ActivationStore(CPU)
    store.reserve((keep_of("o"),), 3000)
    first = store._slab
    assert first.numel() == 3000
    store.reserve((keep_of("o"),), 1500)
    assert store._slab is first
    store.reserve((keep_of("o"),), 4000)
    assert store._slab.numel() == 4000


def test_host_memory_that_is_short_is_named_before_it_is_taken() -> None:
    store = ActivationStore(CPU, host_limit_gib=1.0)
    with pytest.raises(UserError, match="host memory is 1.0 GiB short of the 2.0 GiB"):
        store.reserve((keep_of("o"),), 2**31)
    assert store._slab.numel() == 0


class Link:
    """A stream whose events say how many copies were given to it before."""

    def __init__(self, copies: list) -> None:
        self.copies, self.waited = copies, 0

    def wait_stream(self, stream: object) -> None:
        pass

    def record_event(self) -> int:
        return len(self.copies)

    def wait_event(self, event: int) -> None:
        self.waited = max(self.waited, event)


def test_every_tile_is_waited_for_though_the_layer_below_comes_early(monkeypatch) -> None:
    """The order of schedule: h is given back while other tiles have not been waited for."""
    store = ActivationStore(CPU)
    store.reserve(3 * (keep_of("h", "h"),), 2**16)
    tiles, names = [slice(0, 4), slice(4, 8), slice(8, 10)], ("x", "o", "lse", "h")
    saved = []
    for layer in range(3):
        saved.append(store.open(2 - layer))
        kept = {name: torch.full((10, 2), float(layer)) for name in names}
        lse = kept.pop("lse")
        store.add(saved[-1], "h", kept)
        store.add(saved[-1], "h", {"lse": lse}, whole=["lse"])
        store.send(saved[-1], *names)
        store.release(saved[-1])
    copies: list = []
    link = Link(copies)
    monkeypatch.setattr(store, "_in", link)
    monkeypatch.setattr("torch.cuda.stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: link)
    host = store._host
    monkeypatch.setattr(store, "_host", lambda entry: copies.append(entry) or host(entry))
    link.device = CPU
    for layer, this in reversed([*enumerate(saved)]):
        entries = [*this.entries.values()]
        kept = store.load(this, tiles)
        for i, tile in enumerate(tiles):
            link.waited = 0
            store.wait(tile)
            last = [n for n, entry in enumerate(copies) if entry in entries]
            assert link.waited > last[len(names) - 1], f"tile {i} of layer {layer} is not there"
            assert link.waited > last[-1] or i < 2
            assert all(bool((kept[name][tile] == layer).all()) for name in names)
            store.retire(this, tile, "h")
        store.retire(this, tiles[0], "lse", "x", "o")
        store.finish(this)
    assert len(copies) == 3 * (3 * len(tiles) + 1)  # lse comes whole


def test_a_tensor_that_was_not_sent_is_no_garbage_in_backward() -> None:
    store = ActivationStore(CPU)
    store.reserve((keep_of("o", "o"),), 2**16)
    saved = store.open(0)
    store.add(saved, "x", {"x": torch.ones(10, 2)})
    store.send(saved, "x")
    store.add(saved, "o", {"o": torch.ones(10, 2)}, of_tiles=True)
    with pytest.raises(RuntimeError, match="10 of 10 rows of 'o' wait on the host and were never"):
        store.release(saved)
    store.send(saved, "o", tile=slice(0, 8))
    with pytest.raises(RuntimeError, match="2 of 10 rows of 'o'"):
        store.release(saved)
    store.send(saved, "o", tile=slice(8, 10))
    store.release(saved)


KINDS = (
    {"x": (10, 2), "o": (10, 4), "lse": (3, 10)},
    {"x": (10, 2), "state": (10, 4), "route": (10, 1)},
)
"""What two kinds of layers keep. A state takes the buffer of o, and o that of a state."""


def test_kinds_of_layers_that_alternate_fill_each_others_buffers(monkeypatch) -> None:
    device = torch.device(DEVICE)
    store, tiles = ActivationStore(device), [slice(0, 4), slice(4, 8), slice(8, 10)]
    names = frozenset(name for kind in KINDS for name in kind)
    store.reserve((Keep(names, names),), 2**16)
    copies: list = []
    host = store._host
    saved = []
    for layer in range(6):
        saved.append(store.open(5 - layer))
        for name, shape in KINDS[layer % 2].items():
            kept = {name: torch.full(shape, float(layer), device=device)}
            store.add(saved[-1], name, kept, whole=["lse"])
            store.send(saved[-1], name)
        store.release(saved[-1])
    monkeypatch.setattr(store, "_host", lambda entry: copies.append(entry) or host(entry))
    for layer, this in reversed([*enumerate(saved)]):
        entries, own = this.entries, 4 * sum(e.shape.numel() for e in this.entries.values())
        early = {name for name, entry in entries.items() if entry in copies}
        assert early == (set() if layer == 5 else {"x", "o"} if layer % 2 == 0 else {"x", "state"})
        kept = store.load(this, tiles)
        for tile in tiles:
            store.wait(tile)
            for name, tensor in kept.items():
                rows = slice(None) if name == "lse" else tile
                assert bool((tensor[rows] == layer).all()), (layer, name)
                if name != "lse" or tile is tiles[-1]:
                    tensor[rows] = -1.0  # backward computes in place
            store.retire(this, tile, *(name for name in kept if name != "lse"))
        storages = {t.untyped_storage() for t in store.tensors_on_gpu()}
        assert sum(storage.nbytes() for storage in storages) == own
        store.finish(this)
    assert store.tensors_on_gpu() == []


@pytest.mark.gpu
def test_the_slab_is_page_locked_until_it_is_gone() -> None:
    slab = PinnedSlab(3 * 2**20 + 7, torch.device("cuda"))
    address = slab.data
    assert address.is_pinned()
    del slab
    assert not address.is_pinned()


@pytest.mark.gpu
def test_a_slab_that_is_locked_later_keeps_its_data() -> None:
    slab = PinnedSlab(3 * 2**20 + 7, torch.device("cuda"), locked=False)
    assert not slab.data.is_pinned()
    slab.data.copy_(torch.arange(slab.data.numel()) % 251)
    written = slab.data.clone()
    slab.lock()
    assert slab.data.is_pinned() and torch.equal(slab.data, written)


def test_a_forked_process_has_no_copy_of_the_slab() -> None:
    """Or each data loader's worker would take as much again."""
    without_gib, _ = fork()
    slab = PinnedSlab(2**28, torch.device(DEVICE))
    slab.data.fill_(1)
    with_gib, _ = fork()
    assert slab.data[-1] == 1
    assert with_gib < without_gib + 0.1


LADDERS = {
    "mixed": (keep_of("x", "x"), keep_of("o", "o"), keep_of("all", "h"), keep_of("o")),
    "every 2nd": every_kth(2, 4),
    "every 3rd": every_kth(3, 4),
    "the first": every_kth(3, 4, last=1),
}


@pytest.mark.gpu
@pytest.mark.parametrize("keep", ["x", "o", "h", "qkv", "all", *LADDERS])
def test_copies_beside_compute_change_no_bit(keep: str) -> None:
    """Four layers of Llama-3.1-8B, steps of random lengths, the slab poisoned before each one:
    losses and gradients are those of a store that keeps x alone and on the GPU. A copy that starts
    early or ends late reads NaN."""
    device = torch.device("cuda")
    config = load_config(ModelArguments(preset="llama-3.1-8b", seq_len=16384), vocab_size=1)
    config.num_hidden_layers, config.vocab_size = 4, 1024
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    draw = random.Random(0)

    def gradients(offload: str, tokens: int, tile: int, groups: int) -> list[torch.Tensor]:
        # Of the backends on a GPU only plain torch repeats itself bit for bit: the others sum dq
        # by atomics, so two runs differ by 5e-3.
        args = PatchOptions(
            offload_activations=offload,
            attn_backend="math",
            keep="x" if offload == "none" else "all" if keep in LADDERS else keep,
            tile_tokens=tile,
            head_groups=groups,
        )
        runtime = getattr(model, "longctx", None)
        if runtime is None or runtime.args.offload_activations != offload:
            if runtime is not None:
                unpatch(model)
            patch_as(model, args, device)
        model.longctx.args = args
        model.zero_grad()
        generator = torch.Generator(device).manual_seed(tokens)
        ids = torch.randint(1024, (1, tokens), generator=generator, device=device)
        positions = torch.arange(tokens, device=device)[None] % 1500  # documents of 1500 tokens
        model.longctx.reserve(model, tokens)
        if offload == "all" and keep in LADDERS:
            model.longctx.store.ladder = LADDERS[keep]
        slab = model.longctx.store._slab
        if slab.numel():
            torch.cuda.synchronize()
            slab.fill_(255)  # NaN, in bf16 and fp32
        loss = model(input_ids=ids, labels=ids, position_ids=positions).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    for _ in range(6):
        shape = (draw.randint(3000, 16384), draw.choice([512, 1000, 4096]), draw.choice([1, 4]))
        truth = [grad.clone() for grad in gradients("none", *shape)]
        ours = gradients("all", *shape)
        assert all(torch.equal(a, b) for a, b in zip(truth, ours, strict=True)), shape
