"""Weights from strangers: whole and finite and this model's, or refused by name; none is run."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import zipfile
from pathlib import Path

import torch

from hostile.cases import bound_by_permissions, fails, table, works
from hostile.files import (
    WEIGHTS,
    Payload,
    asking,
    cut,
    edit,
    empty,
    file,
    flip,
    given,
    header,
    in_file,
    instead,
    model,
    payload,
    pytorch_bin,
    remove,
    weights,
    write,
)
from hostile.judge import CANARY

UNREADABLE = "cannot load a model from .*broken"
Q = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"
ONES = torch.ones(4)


def saved(data: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(data, buffer)
    return buffer.getvalue()


def torch_payload(folder: Path) -> bytes:
    return saved(Payload(folder / CANARY))


def zip_of_payload(folder: Path) -> bytes:
    """A zip as torch.save writes it, whose pickle is not torch's."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", payload(folder))
        archive.writestr("archive/version", "3")
    return buffer.getvalue()


def fill(name: str, value: float):
    return weights(lambda tensors: tensors[name].fill_(value))


def entry(name: str, **changes: object):
    return header(lambda said: said[name].update(changes))


def index(**weight_map: str):
    return write("model.safetensors.index.json", json.dumps({"weight_map": weight_map}))


def sharded(folder: Path, **weight_map: str) -> None:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    index(**weight_map)(folder)


def header_of(path: Path, size_bytes: int) -> None:
    """A file that is as long as its header says, of nothing."""
    path.write_bytes(size_bytes.to_bytes(8, "little") + b"{}")
    os.truncate(path, size_bytes + (1 << 20))


MODELS = {
    # the file
    "no weights": (model(remove(WEIGHTS)), fails("no file named model.safetensors")),
    "half the weights": (model(cut(WEIGHTS)), fails(UNREADABLE + ".* incomplete metadata")),
    "empty weights": (model(in_file(WEIGHTS, empty)), fails(UNREADABLE)),
    "seven bytes": (model(write(WEIGHTS, b"1234567")), fails(UNREADABLE)),
    "weights of text": (model(write(WEIGHTS, "hello " * 99)), fails(UNREADABLE)),
    "weights of HTML": (model(write(WEIGHTS, "<!DOCTYPE html><html>404")), fails(UNREADABLE)),
    "a Git LFS pointer": (
        model(write(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")),
        fails(UNREADABLE),
    ),
    "a header of exabytes": (model(write(WEIGHTS, b"\xff" * 8 + b"{}")), fails(UNREADABLE)),
    "a header of zeros": (model(write(WEIGHTS, bytes(9999))), fails(UNREADABLE)),
    "a header that is no JSON": (
        model(write(WEIGHTS, b"\x04" + bytes(7) + b"nope")),
        fails(UNREADABLE),
    ),
    "a flipped header": (model(in_file(WEIGHTS, lambda p: flip(p, 0.005))), fails(UNREADABLE)),
    "bytes after the end": (
        model(lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes() + b"more")),
        fails(UNREADABLE),
    ),
    "a folder for weights": (
        model(lambda f: (remove(WEIGHTS)(f), (f / WEIGHTS).mkdir())),
        fails("broken"),
    ),
    "a link to nothing": (
        model(lambda f: (remove(WEIGHTS)(f), (f / WEIGHTS).symlink_to("nowhere"))),
        fails("broken"),
    ),
    "a link to itself": (
        model(lambda f: (remove(WEIGHTS)(f), (f / WEIGHTS).symlink_to(WEIGHTS))),
        fails("broken"),
    ),
    "weights nobody may read": (
        model(lambda f: (f / WEIGHTS).chmod(0)),
        fails("broken.*Permission denied|broken"),
        bound_by_permissions,
    ),
    "a folder nobody may read": (
        model(lambda f: f.chmod(0)),
        fails("broken"),
        bound_by_permissions,
    ),
    # the header
    "no tensors": (header(lambda said: {}), fails("broken")),
    "an offset beyond the end": (entry(Q, data_offsets=[0, 10**12]), fails(UNREADABLE)),
    "an offset before the start": (entry(Q, data_offsets=[-4096, 0]), fails(UNREADABLE)),
    "offsets that overlap": (entry(Q, data_offsets=[0, 4096]), fails(UNREADABLE)),
    "a shape of exabytes": (entry(Q, shape=[10**9, 10**9]), fails(UNREADABLE)),
    "a negative shape": (entry(Q, shape=[-32, -32]), fails(UNREADABLE)),
    "a shape of words": (entry(Q, shape=["a"]), fails(UNREADABLE)),
    "an unknown dtype": (entry(Q, dtype="F7"), fails(UNREADABLE)),
    "integers": (entry(Q, dtype="I32"), fails("I32, no floating point")),
    "a tensor of two names": (
        header(lambda said: said | {"extra": said[Q]}),
        fails(UNREADABLE),
    ),
    # the tensors
    "a missing tensor": (
        weights(lambda t: t.pop(Q)),
        fails("1 of the model's weights are not in .*q_"),
    ),
    "a whole layer missing": (
        weights(lambda t: [t.pop(name) for name in list(t) if ".layers.1." in name]),
        fails("9 of the model's weights are not in"),
    ),
    "a tensor too many": (
        weights(lambda t: t.update(extra=torch.zeros(3))),
        fails(r"1 of the tensors in .* are read by nobody \(extra\): trained without them"),
    ),
    **{
        f"a tensor that nobody reads: {name}": (
            weights(lambda t, name=name: t.update({name: torch.ones(1)})),
            fails(rf"read by nobody \({re.escape(name)}\)"),
        )
        for name in (f"{Q}_scale_inv", "model.layers.9.mlp.up_proj.weight", "lm_head.bias")
    },
    "frequencies of an old RoPE": (
        weights(
            lambda t: t.update({Q.replace("q_proj.weight", "rotary_emb.inv_freq"): t[NORM] * 1})
        ),
        works(),
    ),
    "names of another library": (
        weights(lambda t: [t.update({f"x.{name}": t.pop(name)}) for name in list(t)]),
        fails("of the model's weights are not in"),
    ),
    "a tensor of another shape": (
        weights(lambda t: t.update({NORM: t[NORM][:7].clone()})),
        fails(r"1 of the model's weights have another shape in .*model\.norm\.weight \(7,\)"),
    ),
    "an empty tensor": (
        weights(lambda t: t.update({Q: torch.zeros(0, 32)})),
        fails("another shape"),
    ),
    "a scalar for a matrix": (
        weights(lambda t: t.update({Q: torch.tensor(1.0)})),
        fails("another shape"),
    ),
    "NaN": (fill(Q, float("nan")), fails("not finite.*q_proj")),
    "one NaN": (weights(lambda t: t[NORM].view(-1)[3].fill_(float("nan"))), fails("not finite")),
    "infinity": (fill(NORM, float("inf")), fails("not finite")),
    "zeros": (weights(lambda t: [x.zero_() for x in t.values()]), works()),
    "huge numbers": (fill(Q, 3e38), fails("not finite")),
    "float64": (weights(lambda t: t.update({n: x.double() for n, x in t.items()})), works()),
    "float16": (weights(lambda t: t.update({n: x.half() for n, x in t.items()})), works()),
    "integers in a whole file": (
        weights(lambda t: t.update({Q: t[Q].int()})),
        fails("q_proj|broken"),
    ),
    "complex numbers": (
        weights(lambda t: t.update({Q: t[Q].to(torch.complex64)})),
        fails("broken|q_proj"),
    ),
    # several files
    "an index of nothing": (
        model(lambda f: (remove(WEIGHTS)(f), index()(f))),
        fails("broken"),
    ),
    "an index of a missing file": (
        model(lambda f: (remove(WEIGHTS)(f), index(a="model-00001-of-00002.safetensors")(f))),
        fails("broken"),
    ),
    "an index that is no JSON": (
        model(lambda f: (remove(WEIGHTS)(f), write("model.safetensors.index.json", "{")(f))),
        fails("broken"),
    ),
    "an index of another folder": (
        model(lambda f: sharded(f, **{Q: "../../base/model/model.safetensors"})),
        fails("broken"),
    ),
    "an index of one tensor": (
        model(lambda f: sharded(f, **{Q: "model-00001-of-00001.safetensors"})),
        fails(UNREADABLE),
    ),
    # pickles
    "a pickle that runs code": (
        pytorch_bin(lambda f: payload(f.parent)),
        fails("broken holds a file that is damaged or would run code"),
    ),
    "torch.save that runs code": (
        pytorch_bin(lambda f: torch_payload(f.parent)),
        fails("broken holds a file that is damaged or would run code"),
    ),
    "a zip that runs code": (
        pytorch_bin(lambda f: zip_of_payload(f.parent)),
        fails("broken"),
    ),
    "an empty pickle": (pytorch_bin(b""), fails("broken")),
    "a pickle of text": (pytorch_bin(b"hello"), fails("broken")),
    "a pickle of a list": (pytorch_bin(saved([1, 2])), fails("broken")),
    "integers in a pickle": (
        pytorch_bin(saved({Q: torch.zeros(32, 32, dtype=torch.int8)})),
        fails("q_proj.weight in pytorch_model.bin holds int8, no floating point"),
    ),
    "an index that leads out of the folder": (
        model(
            lambda f: (
                remove(WEIGHTS)(f),
                write(
                    "pytorch_model.bin.index.json",
                    json.dumps({"weight_map": {Q: "../../base/model/model.safetensors"}}),
                )(f),
            )
        ),
        fails("names ../../base/model/model.safetensors, which is not in the folder"),
    ),
    "a pickle of numbers": (pytorch_bin(saved({Q: 1})), fails("broken")),
    "half a pickle": (pytorch_bin(saved({Q: torch.zeros(32, 32)})[:700]), fails("broken")),
    "a pickle named safetensors": (pytorch_bin(pickle.dumps({}), WEIGHTS), fails(UNREADABLE)),
    "a TensorFlow file": (pytorch_bin(b"\x89HDF\r\n\x1a\n", "tf_model.h5"), fails("broken")),
    "a GGUF among them": (pytorch_bin(b"GGUF", "model.gguf"), fails("broken")),
    "a pickle that asks for 9 GB": (
        model(lambda f: (remove(WEIGHTS)(f), asking("pytorch_model.bin")(f))),
        fails("broken: reading pytorch_model.bin takes more than .* GiB of memory"),
    ),
    "a pickle of a tensor larger than its bytes": (
        pytorch_bin(saved({Q: torch.zeros(1).expand(10**12)})),
        fails("broken: pytorch_model.bin holds a tensor that is larger than its bytes"),
    ),
    "a header of sixty megabytes": (
        model(lambda f: header_of(f / WEIGHTS, 60 << 20)),
        fails("broken: model.safetensors says that its header has 62914560 bytes"),
    ),
    **{
        f"{name} is {what}": (
            model(instead(name, make)),
            fails(f"broken: {name} is not a regular file"),
        )
        for name in (WEIGHTS, "tokenizer.json", "generation_config.json", "pytorch_model.bin")
        for what, make in {
            "a pipe": os.mkfifo,
            "an endless device": lambda p: p.symlink_to("/dev/zero"),
        }.items()
    },
    # adapters and quantised models
    "an adapter alone": (
        model(lambda f: (remove(WEIGHTS)(f), write("adapter_config.json", '{"r": 8}')(f))),
        fails("broken"),
    ),
    "an adapter beside it": (
        model(
            write("adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "x"}')
        ),
        fails("adapter|broken"),
    ),
    "quantised by nobody": (
        model(edit("config.json", quantization_config={"quant_method": "nonsense"})),
        fails("broken.*nonsense"),
    ),
    "quantised by bitsandbytes": (
        model(
            edit(
                "config.json",
                quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True},
            )
        ),
        fails("broken"),
    ),
    "quantised by a number": (model(edit("config.json", quantization_config=7)), fails("broken")),
    # GGUF
    "a GGUF file of text": (
        file("bad.gguf", "not a model", "--model_name_or_path"),
        fails("bad.gguf does not start with the GGUF magic"),
    ),
    "an empty GGUF file": (file("bad.gguf", b"", "--model_name_or_path"), fails("bad.gguf")),
    "a GGUF header alone": (
        file("bad.gguf", b"GGUF\x03\0\0\0" + bytes(16), "--model_name_or_path"),
        fails("bad.gguf"),
    ),
    "a GGUF of endless tensors": (
        file("bad.gguf", b"GGUF\x03\0\0\0" + b"\xff" * 16, "--model_name_or_path"),
        fails("bad.gguf"),
    ),
    "a GGUF folder": (given("--model_name_or_path FOLDER/tmp.gguf"), fails("tmp.gguf")),
}

CASES = table("models", MODELS)
