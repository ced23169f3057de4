"""Shows that a change moves no bit: hashes of losses, gradients and updated weights on a CPU.

    python scripts/same_bits.py              prints them for this tree
    python scripts/same_bits.py COMMIT       trains that commit's tree, too, and names what differs

Each case trains a small model of tests/ for two steps, with the plain references instead of
kernels: every family in fp32 and bf16, ladders, tiles, head groups, places of exact states,
adapters, and the losses of tasks. Hashes of two machines or two versions of torch differ.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from small_families import EXPERTS, FAMILIES, FIRST_OF_EACH, family_config
from small_layer import KEEPS, PACKED, batches, cast
from small_states import everything_on_gpu, hosted, llama, nothing_on_gpu, place
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import longctx
from longctx.cost.kept import Keep

ROOT = Path(__file__).resolve().parents[1]
Steps = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""The losses, gradients and updated weights of a case."""
STEPS = 2
LORA = dict(r=8, lora_alpha=12, target_modules="all-linear", init_lora_weights=False)


def hashed(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


@cache
def vanilla(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(family)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return cast(model, dtype)


def loss_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**inputs).loss
    return loss


def trained(model: Any, loss: Callable[[Any, dict[str, Tensor]], Tensor] = loss_of) -> Steps:
    """Trains with torch's AdamW."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, eps=1e-5)
    losses, gradients = [], []
    for inputs in batches(PACKED, STEPS):
        optimizer.zero_grad()
        losses.append(loss(model, inputs))
        losses[-1].backward()
        gradients += [p.grad.clone() for p in weights if p.grad is not None]
        optimizer.step()
    return losses, gradients, weights


def of_family(family: str, dtype: torch.dtype, **settings: Any) -> Steps:
    torch.manual_seed(1)
    return trained(longctx.patch(copy.deepcopy(vanilla(family, dtype)), strict=True, **settings))


def of_ladder(family: str, ladder: tuple[Keep, ...]) -> Steps:
    settings = dict(offload_activations="all", keep="all", tile_tokens=31)
    model = longctx.patch(copy.deepcopy(vanilla(family, torch.float32)), strict=True, **settings)
    model(**batches(PACKED, 1)[0])  # sizes the slab
    model.longctx.store.ladder = ladder
    return trained(model)


def with_adapters(family: str, dtype: torch.dtype, **settings: Any) -> Steps:
    import peft

    torch.manual_seed(2)
    config = peft.LoraConfig(**LORA | settings)
    model = peft.get_peft_model(copy.deepcopy(vanilla(family, dtype)), config)
    return trained(longctx.patch(model, strict=True, tile_tokens=40))


def of_places(where: Any, dtype: torch.dtype, keep: str, family: str, accumulates: bool) -> Steps:
    """Trains with exact AdamW, whose gradients are seen by their norm."""
    model = llama(dtype, keep=keep, family=family)
    placed = place(model, where, ladder=hosted(1, keep), accumulates=accumulates, tokens=144)
    optimizer = placed.optimizer()
    losses, norms = [], []
    for inputs in batches(PACKED, STEPS):
        for _ in range(1 + accumulates):
            losses.append(loss_of(model, inputs))
            losses[-1].backward()
        norms.append(optimizer.clip(0.5))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, [*optimizer.masters(model).values()]


def log_probs_loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    inputs = dict(inputs)
    labels = nn.functional.pad(inputs.pop("labels")[:, 1:], (0, 1), value=-100)
    hidden = model.model(**inputs).last_hidden_state
    found = longctx.linear_log_probs(hidden, model.lm_head.weight, labels)
    return -found.log_probs.sum() / 100


def pairs_loss(made: Any, model: Any, inputs: dict[str, Tensor]) -> Tensor:
    labels = nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    two = [x.reshape(2, -1) for x in (inputs["input_ids"], labels)]
    hidden = model.model(two[0]).last_hidden_state
    loss: Tensor = made(hidden, model.lm_head.weight, two[1]).loss
    return loss


def logits_loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(**inputs).logits.float().logsumexp(-1).mean()
    return found


def cases() -> Iterator[tuple[str, Callable[[], Steps]]]:
    for family in FAMILIES:
        for dtype in (torch.float32, torch.bfloat16):
            yield f"{family} {dtype}", partial(of_family, family, dtype)
    for family in ("llama", "olmo2", "gemma3_text", "cohere", "nemotron"):
        for i, keep in enumerate(KEEPS[::5]):
            ladder = (keep, KEEPS[7 * i % len(KEEPS)], KEEPS[11 * i % len(KEEPS)])
            yield f"{family} {i}: ladder", partial(of_ladder, family, ladder)
        for tile, groups in ((7, 2), (32, 1), (57, 2), (144, 1)):
            cut = dict(tile_tokens=tile, head_groups=groups if family != "cohere" else 1)
            yield f"{family} {cut}", partial(of_family, family, torch.bfloat16, **cut)
    for family in FIRST_OF_EACH:
        yield f"{family} LoRA", partial(with_adapters, family, torch.float32, **maps_of(family))
    for settings in (dict(lora_dropout=0.2), dict(target_modules=["q_proj", "down_proj"])):
        yield f"LoRA {settings}", partial(with_adapters, "llama", torch.bfloat16, **settings)
    places = dict(gpu=everything_on_gpu, host=nothing_on_gpu)
    for name, where in places.items():
        for dtype in (torch.float32, torch.bfloat16):
            for family in ("llama", "qwen3"):
                for keep in ("x", "o", "all"):
                    case = partial(of_places, where, dtype, keep, family, keep == "o")
                    yield f"{family} {dtype} states on {name}, keep {keep}", case
    yield "log-probabilities", lambda: trained(patched(), log_probs_loss)
    yield "logits", lambda: trained(patched(), logits_loss)
    for kind in ("ORPO", "CPO", "SimPO"):
        made = getattr(longctx.losses, f"Linear{kind}Loss")()
        yield kind, lambda made=made: trained(patched(), partial(pairs_loss, made))


def maps_of(family: str) -> dict[str, Any]:
    """The maps that get adapters, if not all linear ones: PEFT's word for those adapts routers, and
    fails for the output of Mamba 2 in some families."""
    config = family_config(family)
    routed = family in EXPERTS or "moe" in config.model_type or family == "qwen3_next"
    if routed or config.model_type in ("falcon_h1", "nemotron_h"):
        return dict(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    return {}


def patched() -> Any:
    return longctx.patch(copy.deepcopy(vanilla("llama", torch.float32)), strict=True)


def lines() -> Iterator[str]:
    for name, case in cases():
        with contextlib.redirect_stdout(sys.stderr):  # what a patched model says of itself
            found = zip(("loss", "gradients", "weights"), case(), strict=True)
        yield from (f"{hashed(tensors)} {name}: {what}" for what, tensors in found)


def lines_of(commit: str) -> list[str]:
    """Trains the cases of this script in the tree of a commit."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        there = shutil.copy(__file__, Path(folder, "scripts"))
        found = subprocess.run([sys.executable, there], check=True, stdout=subprocess.PIPE)
        return found.stdout.decode().splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commit", nargs="?", help="what this tree is compared with")
    commit = parser.parse_args().commit
    found = []
    for line in lines():
        found.append(line)
        if commit is None:
            print(line, flush=True)
    if commit is None:
        return
    there = lines_of(commit)
    for line in sorted({*found} ^ {*there}, key=lambda line: line.split(" ", 1)[1]):
        print(line, "only", "here" if line in found else f"at {commit}")
    print(f"{len({*found} & {*there})} of {len(found)} hashes are equal")


if __name__ == "__main__":
    main()
