"""What an engine keeps on each of n GPUs, in bytes, by phase of a step; nothing of it is started.

N parameters of which a layer has L, lm_head h and the embedding e; bytes of one rank:

                  between steps                        gathered, bf16, while it computes
    ZeRO-1, 2     2 N + 12 N / n, gradients 2 N        everything is there
    ZeRO-3        16 N / n (8 of them come with the    2 x 2 L in forward, 3 x 2 L in backward,
                  first update)                        h and two layers at the loss
    FSDP2         12 N / n, gradients 4 N / n          2 L and the next, as it came, 2 L; h twice

ZeRO-3 fetches a layer more at each module that it enters, the final norm too, up to
`stage3_max_live_parameters`; FSDP2 copies what it gathered (all_gather_copy_out), and sums whole
gradients in fp32 (4 L) while the layer below computes. With offload everything between steps waits
on the host. DeepSpeed pins there, and torch rounds each pinned block up to a power of two.

Of adapters (N parameters in fp32) over F frozen ones in bf16, bytes of one rank:

    ZeRO-1, 2     2 F + 4 N + 12 N / n, gradients 4 N       nothing is gathered
    ZeRO-3        (2 F + 16 N) / n                          as above, adapters with 4 bytes
    FSDP2         (2 F + 12 N) / n, gradients 4 N / n       the same

Frozen weights have no states and no gradients: only adapters' are summed. What is gathered is
counted in 16-bit words, of which a parameter of an adapter has two.

Sources: DeepSpeed 0.19 (runtime/zero/stage3.py, partitioned_param_coordinator.py), torch 2.11
(distributed/fsdp/_fully_shard).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from longctx.cost.fitted import (
    ENGINE_PROCESS_GIB,
    ENGINE_UPDATE_BYTES,
    HOOKS_PARAMETERS,
    ZERO_PROCESS_GIB,
    ZERO_UPDATE_BYTES,
)
from longctx.cost.sizes import Parameters
from longctx.memory.pending import Pending

BF16, FP32 = 2, 4
Buffers = dict[str, int]
"""Maps names of buffers to their bytes."""
LEAST_PINNED = 2**12  # bytes: a page, the smallest block that is locked


@dataclass(frozen=True, kw_only=True)
class Layout:
    """An engine's answer to where everything is. Bytes are of one rank."""

    name: str
    processes: int = 1
    offloads: bool = False
    """Whether everything between steps is on the host."""
    process_gib: float = ENGINE_PROCESS_GIB
    """Host memory of a process: Python, torch, CUDA and the engine."""
    update_bytes: int = ENGINE_UPDATE_BYTES
    """Bytes read and written while a parameter is updated on the GPU."""

    @property
    def states_on_host(self) -> bool:
        """True if the states wait on the host; AdamW runs there, too."""
        return self.offloads

    @property
    def gradients_stand(self) -> bool:
        """Whether all gradients are allocated from the beginning."""
        return False

    def standing(self, p: Parameters) -> Buffers:
        """Returns what lies on the GPU between steps, without gradients."""
        raise NotImplementedError

    def shard(self, p: Parameters) -> int:
        """Parameters of a rank."""
        return p.total // self.processes

    def late(self, p: Parameters) -> int:
        """Returns the bytes of `standing` that the first update makes: AdamW's two moments."""
        return 0 if self.states_on_host else moments_bytes(p.total, self.processes)

    def gradient(self, p: Parameters, numel: int) -> int:
        """Returns the GPU bytes of gradients of `numel` parameters, from backward to the update."""
        raise NotImplementedError

    def whole(self, numel: int) -> int:
        """Returns the bytes of `numel` gradients as backward makes them."""
        return BF16 * numel

    def forward(self, p: Parameters) -> Buffers:
        """Returns what is gathered while a layer's forward runs."""
        return {}

    def loss(self, p: Parameters) -> Buffers:
        return {}

    def backward(self, p: Parameters, above: int) -> Buffers:
        """Returns what is there while a layer's backward runs; `above` are the parameters of the
        block above."""
        return {}

    def reducing(self, p: Parameters, numel: int) -> Buffers:
        """Returns what is there while whole gradients of `numel` parameters, lm_head's or the
        embedding's, are summed."""
        return {"whole gradients": BF16 * numel}

    def update(self, p: Parameters) -> Buffers:
        return {}

    def host(self, p: Parameters) -> int:
        """Returns the bytes of this rank on the host, for weights, gradients and states."""
        return 0

    def pending(self, p: Parameters) -> Pending:
        """Returns the GPU bytes that the first step allocates beyond what is there when the search
        for what layers keep runs."""
        raise NotImplementedError

    # --- seconds: bytes of one rank in a step --------------------------------------------------

    def gathers(self, p: Parameters, passes: int) -> int:
        """Returns the bytes that come from other ranks."""
        return 0

    def reduces(self, p: Parameters, passes: int) -> int:
        """Returns the bytes of gradients that go to other ranks."""
        return 0

    def moved(self, p: Parameters) -> int:
        """Returns the bytes that are read and written on the GPU for gathering and summing, in a
        batch."""
        return 0

    def up(self, p: Parameters) -> int:
        """Returns the bytes over the link in forward: weights."""
        return 0

    def chain(self, p: Parameters) -> int:
        """Returns the bytes over the link in backward, one copy after the other."""
        return 0

    def waits(self, p: Parameters) -> float:
        """Returns the seconds of a backward in which the GPU has nothing to do, beyond what is
        exchanged."""
        return 0.0


def gathering_pending(shards: Pending, gathered: int, head: int, stay: int = 0) -> Pending:
    """Returns what FSDP2 allocates late, with shards in fp32. What is gathered comes on a stream of
    its own, whose memory the computation cannot use when it is free again. lm_head's gradient
    (`head` parameters) is summed in fp32, and copied for it. `stay` bytes are gathered in forward
    and wait for backward."""
    return shards._replace(states=shards.states + 2 * gathered + FP32 * head + stay)


def moments_bytes(numel: int, processes: int) -> int:
    """Returns the bytes of AdamW's two moments of a rank's shard, which torch makes in the first
    update."""
    return 2 * FP32 * (numel // processes)


def gathered_bytes(layers: int, output: int, trained: int) -> int:
    """Returns the bytes of weights gathered in 16 bits: `layers` of the layer that runs and the
    next one, lm_head's (`output`), and its gradient's (`trained`, none if it is frozen)."""
    return BF16 * (layers + output + trained)


def frozen_bytes(p: Parameters, ranks: int) -> int:
    """Returns the bytes of a rank's frozen weights."""
    return BF16 * (sum(p.frozen) // ranks)


def gathered_words(p: Parameters) -> int:
    """Returns the words gathered in forward and again in backward. lm_head is gathered once, and so
    is a frozen embedding, which has no backward."""
    return 2 * p.words - p.head - (p.embedding - p.trained_embedding) * bool(p.head)


@dataclass(frozen=True, kw_only=True)
class FullyShard(Layout):
    """FSDP2: fp32 shards; layers, the embedding, and final norm with lm_head are its groups."""

    name: str = "FSDP2"
    reshards: bool = True
    """Whether a layer's gathered weights are freed after its forward, and gathered again."""

    def _gathered(self, p: Parameters, numel: int) -> Buffers:
        """Returns the gathered weights with their copy: all weights, if none are freed early."""
        more = 0 if self.reshards else p.words
        return {"gathered weights": BF16 * (2 * numel + more)}

    def _weights(self, p: Parameters) -> int:
        """Returns the bytes of a rank's weights."""
        return FP32 * self.shard(p) + frozen_bytes(p, self.processes)

    def standing(self, p: Parameters) -> Buffers:
        if self.offloads:
            return {}
        return {"weights": self._weights(p), "AdamW's states": 2 * FP32 * self.shard(p)}

    def gradient(self, p: Parameters, numel: int) -> int:
        return 0 if self.offloads else FP32 * numel // self.processes

    def forward(self, p: Parameters) -> Buffers:
        return self._gathered(p, p.layer)

    def loss(self, p: Parameters) -> Buffers:
        """Returns what the loss gathers, which stays until backward."""
        return self._gathered(p, p.output)

    def backward(self, p: Parameters, above: int) -> Buffers:
        return {
            **self._gathered(p, p.layer),
            "gradients to sum, fp32": FP32 * above,
        }

    def reducing(self, p: Parameters, numel: int) -> Buffers:
        return {
            "whole gradients": BF16 * numel,
            "gradients to sum, fp32": FP32 * numel + FP32 * numel // self.processes,
            "gathered weights": BF16 * p.layer,
        }

    def host(self, p: Parameters) -> int:
        """Returns the bytes of shards, gradients and states, which are pinned as they are."""
        states = 4 * FP32 * p.total // self.processes
        return states + frozen_bytes(p, self.processes) if self.offloads else 0

    def pending(self, p: Parameters) -> Pending:
        shards = Pending(self.late(p), 0 if self.offloads else FP32 * self.shard(p))
        head = 0 if p.adapters else p.output
        gathered = gathered_bytes(2 * p.layer, p.output, head)
        stay = 0 if self.reshards else BF16 * p.words
        return gathering_pending(shards, gathered, head, stay)

    def gathers(self, p: Parameters, passes: int) -> int:
        times = gathered_words(p) if self.reshards else p.words
        return passes * BF16 * times * (self.processes - 1) // self.processes

    def reduces(self, p: Parameters, passes: int) -> int:
        return passes * FP32 * p.total * (self.processes - 1) // self.processes

    def moved(self, p: Parameters) -> int:
        """Counts a shard as read in fp32 (a frozen one in bf16) and written in bf16; what was
        gathered is read and written; whole gradients are read in bf16, written and summed in
        fp32."""
        stored = BF16 if p.adapters else FP32
        gathered = (stored + BF16) / self.processes + BF16 + 2 * BF16
        summed = BF16 + 2 * FP32 + FP32 / self.processes
        return int(p.words * 2 * gathered + p.total * summed)

    def up(self, p: Parameters) -> int:
        """Returns the bytes of fp32 shards, cast on the GPU, and of frozen ones."""
        return self._weights(p) if self.offloads else 0

    def chain(self, p: Parameters) -> int:
        return self._weights(p) + FP32 * self.shard(p) if self.offloads else 0


@dataclass(frozen=True, kw_only=True)
class Zero(Layout):
    """The layout of DeepSpeed's ZeRO, of any stage."""

    name: str = "ZeRO"
    process_gib: float = ZERO_PROCESS_GIB
    update_bytes: int = ZERO_UPDATE_BYTES
    stage: int = 3
    accumulates: bool = False
    """Whether gradients add up in fp32 over several batches."""
    reduce_bucket: int | None = None
    """Elements of a bucket; None ("auto"): D^2."""
    max_live: int = 1_000_000_000
    sub_group: int = 1_000_000_000
    offloads_weights: bool = False
    offloads_states: bool = False
    pins: bool = True

    @property
    def states_on_host(self) -> bool:
        return self.offloads_states

    def _grad_bytes(self, p: Parameters) -> int:
        return FP32 if self.accumulates or p.adapters else BF16

    @property
    def _summed_bytes(self) -> int:
        """Returns the bytes of a number while gradients are summed: fp32 among several ranks."""
        return FP32 if self.processes > 1 else BF16

    def _bucket(self, p: Parameters) -> int:
        bucket = p.hidden**2 if self.reduce_bucket is None else self.reduce_bucket
        return self._summed_bytes * bucket * (1 if self.stage == 3 else 2)

    def standing(self, p: Parameters) -> Buffers:
        states = 0 if self.offloads_states else self.shard(p)
        return {
            "weights": 0 if self.offloads_weights else self._weights(p),
            "AdamW's states": 3 * FP32 * states,
            "buckets": self._bucket(p),
        }

    def _weights(self, p: Parameters) -> int:
        """Returns the bytes of a rank's weights. ZeRO-3's fp32 shards of adapters are the masters
        themselves, and counted there, unless the masters wait on the host."""
        ranks = self.processes if self.stage == 3 else 1
        if not p.adapters:
            return BF16 * (p.total // ranks)
        counted = self.stage < 3 or self.offloads_states
        return frozen_bytes(p, ranks) + counted * FP32 * (p.total // ranks)

    @property
    def gradients_stand(self) -> bool:
        return self.stage == 3

    def gradient(self, p: Parameters, numel: int) -> int:
        if self.offloads_states:
            return 0
        share = numel if self.stage == 1 else numel // self.processes
        return self._grad_bytes(p) * share

    def _gathered(self, p: Parameters, numel: int) -> Buffers:
        if self.stage < 3:
            return {}
        return {"gathered weights": BF16 * min(numel, max(self.max_live, p.layer, p.output))}

    def forward(self, p: Parameters) -> Buffers:
        return self._gathered(p, 2 * p.layer)

    def loss(self, p: Parameters) -> Buffers:
        return self._gathered(p, p.output + 2 * p.layer)

    def backward(self, p: Parameters, above: int) -> Buffers:
        return self._gathered(p, 3 * p.layer)

    def reducing(self, p: Parameters, numel: int) -> Buffers:
        """Returns the whole gradients. One rank that offloads takes them up again to make them
        fp32."""
        if self.processes > 1:
            sums = FP32 * numel + self._grad_bytes(p) * numel // self.processes
        else:
            sums = (BF16 + FP32) * numel if self.offloads_states else 0
        return {
            "whole gradients": BF16 * numel,
            "gradients to sum, fp32": sums,
            **self._gathered(p, 3 * p.layer),
        }

    def update(self, p: Parameters) -> Buffers:
        if self.offloads_states:
            return {}
        shard = self.shard(p)
        if self.stage == 3:
            return {"gradients, fp32": FP32 * min(shard, self.sub_group)}
        return {"gradients, fp32": (FP32 + self._grad_bytes(p) * (self.stage == 1)) * shard}

    def host(self, p: Parameters) -> int:
        shards = [numel // self.processes for numel in p.numels]
        total, pinned = sum(shards), _pinned if self.pins else int
        states = weights = 0
        if self.offloads_states:
            groups = _sub_groups(shards, self.sub_group) if self.stage == 3 else [total]
            states = 3 * FP32 * total  # masters and moments, not pinned
            states += sum(pinned(FP32 * numel) for numel in groups)
            states += pinned(self._grad_bytes(p) * total)
        if self.offloads_weights:  # by parameter, kept by torch when they are in one flat buffer
            itemsize = FP32 if p.adapters else BF16
            weights = sum(pinned(itemsize * numel) for numel in shards) + pinned(itemsize * total)
            weights += sum(pinned(BF16 * (numel // self.processes)) for numel in p.frozen)
        return states + weights

    def pending(self, p: Parameters) -> Pending:
        if self.stage < 3:
            return Pending(self.late(p) + (FP32 if p.adapters else BF16) * p.total)
        head = 0 if p.adapters else p.output
        return Pending(self.late(p) + gathered_bytes(2 * p.layer, p.output, head))

    def gathers(self, p: Parameters, passes: int) -> int:
        updated = 2 * p.total if p.adapters else p.total
        times = gathered_words(p) * passes if self.stage == 3 else updated
        return BF16 * times * (self.processes - 1) // self.processes

    def reduces(self, p: Parameters, passes: int) -> int:
        times = passes if self.stage > 1 else 1
        ring = 1 if self.stage > 1 else 2  # an all-reduce
        return times * ring * FP32 * p.total * (self.processes - 1) // self.processes

    def moved(self, p: Parameters) -> int:
        """Counts gathered weights as read and written once more (torch.cat); gradients are read in
        bf16, written, copied and summed in fp32."""
        if self.processes == 1:
            return 0
        gathered = 2 * 3 * BF16 if self.stage == 3 else 0
        summed = BF16 + 3 * FP32 + FP32 / self.processes
        return int(p.words * gathered + p.total * summed)

    def up(self, p: Parameters) -> int:
        return BF16 * p.words // self.processes if self.offloads_weights else 0

    def chain(self, p: Parameters) -> int:
        """Weights come up; a gradient goes down, comes back to be made fp32, and goes down so."""
        shard = self.shard(p)
        gradients = (BF16 + BF16 + FP32) * shard if self.offloads_states else 0
        return gradients + self.up(p)

    def waits(self, p: Parameters) -> float:
        """Returns the seconds that ZeRO-3's hooks wait in backward."""
        hooks = self.stage == 3 and self.processes > 1 and not self.offloads_states
        return p.total / HOOKS_PARAMETERS if hooks else 0.0


def _pinned(nbytes: int) -> int:
    """Returns the size of the block of torch's pinned memory that holds `nbytes`."""
    return 1 << (max(nbytes, LEAST_PINNED) - 1).bit_length()


def _sub_groups(numels: Iterable[int], size: int) -> list[int]:
    """Returns the sizes of DeepSpeed's sub-groups: whole parameters, until there are `size`
    elements or more."""
    groups, numel = [], 0
    for one in numels:
        numel += one
        if numel >= size:
            groups.append(numel)
            numel = 0
    return [*groups, numel] if numel else groups


def fully_shard_layout(offloads: bool, processes: int, *, reshards: bool = True) -> FullyShard:
    name = "FSDP2 with CPU offload" if offloads else "FSDP2"
    return FullyShard(name=name, processes=processes, offloads=offloads, reshards=reshards)
