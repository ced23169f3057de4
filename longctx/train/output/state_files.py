"""A checkpoint's exact AdamW states: a safetensors file a block, written and read one at a time.

    optimizer.00.safetensors    NAME.exp_avg, NAME.exp_avg_sq for each weight NAME; in 16 bits
                                NAME.remainder, and NAME.checksums of the weights it belongs to
                                metadata "longctx": {"format": ..., "files": how many,
                                                     "steps": {NAME: updates}}

Names and shapes are the model's, so where the states live may change from run to run. The weights'
upper halves are the model's own files. States on the host are written from where they are; of those
on the GPU a block at a time is copied.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm

from longctx.errors import UserError, many, print_rank0
from longctx.memory.optimizer import ExactAdamW

KEY, FORMAT = "longctx", "exact AdamW 1"


def state_files(checkpoint: Path) -> list[Path]:
    """Returns the files of exact states in a checkpoint; none if it is of another optimizer."""
    return sorted(checkpoint.glob("optimizer.*.safetensors"))


def write_states(optimizer: ExactAdamW, checkpoint: Path) -> None:
    """Raises OSError, or SafetensorError for a full disk."""
    optimizer.flush()
    blocks, counts = optimizer.stream.blocks, optimizer.steps
    for number, block in enumerate(_progress(blocks, "Saving states")):
        tensors, steps = {}, {}
        for name, parameter in block.spec.parameters.items():
            if parameter not in counts:
                continue
            steps[name] = counts[parameter]
            for kind, states in optimizer.states_of(parameter).items():
                shape = states.shape if kind == "checksums" else parameter.shape
                tensors[f"{name}.{kind}"] = states.view(shape).cpu()
        path = checkpoint / f"optimizer.{number:02d}.safetensors"
        metadata = {"format": FORMAT, "files": len(blocks), "steps": steps}
        save_file(tensors, path, {KEY: json.dumps(metadata)})  # one key: several have any order


def read_states(optimizer: ExactAdamW, checkpoint: Path) -> None:
    """Raises UserError for states of another model, and whatever damaged files raise."""
    missing = {
        name: parameter
        for block in optimizer.stream.blocks
        for name, parameter in block.spec.parameters.items()
        if parameter.requires_grad
    }
    unknown = []
    files = state_files(checkpoint)
    for path in _progress(files, "Loading states"):
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get(KEY, "{}"))
            if metadata.get("format") != FORMAT:
                raise UserError(
                    f"{path} is of the format {metadata.get('format')!r}, which this version of "
                    "longctx does not read: resume with the one that wrote it"
                )
            if metadata["files"] != len(files):
                raise UserError(
                    f"{checkpoint} holds {len(files)} of {metadata['files']} files of states: "
                    "resume from another checkpoint"
                )
            kinds: dict[str, dict[str, Any]] = {}
            for key in file.keys():
                name, _, kind = key.rpartition(".")
                kinds.setdefault(name, {})[kind] = key
            for name, step in metadata["steps"].items():
                if name not in missing:
                    unknown.append(name)
                    continue
                states = {kind: file.get_tensor(key) for kind, key in kinds[name].items()}
                optimizer.load_states(missing.pop(name), states | {"step": step})
    for parameter in missing.values():
        optimizer.load_states(parameter, {})
    if missing:
        print_rank0(
            f"{checkpoint} has no states for {many(len(missing), 'weight')} "
            f"({next(iter(missing))}, ...): they start from zero"
        )
    if unknown:
        raise UserError(
            f"{checkpoint} holds states of {many(len(unknown), 'weight')} that this run does not "
            f"train ({', '.join(unknown[:3])}): train what it trained, or start from its weights "
            "with --model_name_or_path"
        )


def _progress(items: Any, title: str) -> Any:
    return tqdm(items, desc=title, leave=False, delay=2, disable=None)
