"""A pretrained model of a folder, a GGUF file or the hub: its configuration and weights, checked.

What a stranger's files want is not done: no code of theirs runs without --trust_remote_code, no
kernel is fetched, no adapter is put in, no weight is random, none is cast from integers. A folder
with a pipe or a device in it is refused before anything is opened.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import AutoConfig, GenerationConfig, PretrainedConfig
from transformers.utils import ADAPTER_CONFIG_NAME, find_adapter_config_file

from longctx.errors import UserError, one_line, print_rank0, shortened
from longctx.families.classes import auto_class, is_classifier, without_storage
from longctx.families.look import whole_shape
from longctx.noise import hidden_report
from longctx.packages import pip_install
from longctx.system import expanded, installed
from longctx.train.loading import quantised
from longctx.train.loading.config_sizes import check_raw_sizes, check_sizes, experts_of
from longctx.train.loading.weight_files import (
    REWARD_HEAD,
    WEIGHTS,
    check_files,
    fetched_files,
    forget_tie,
    holds_nf4,
    refuse_partial,
    refuse_without_experts,
    unread_of_gguf,
    weight_files,
)
from longctx.train.options.source import ModelSource
from longctx.train.safety.checksum import checksums
from longctx.train.safety.strange_files import refuse_odd, refuse_run


def read_config(source: ModelSource, *, makes_dense: bool = True) -> PretrainedConfig:
    """Returns the configuration of a pretrained model, without what its author chose for other
    machines. `makes_dense` is its engine's answer (train/engines/protocol.py). Raises UserError for
    one that is unreadable, or of a model that cannot be trained."""
    name, where = _pretrained(source)
    try:
        adapter = find_adapter_config_file(name)
        if "gguf_file" not in where:
            check_raw_sizes(str(source.name), PretrainedConfig.get_config_dict(name)[0])
        config = AutoConfig.from_pretrained(name, **where)
    except UserError:
        raise
    except Exception as error:  # a file's values raise as many types as there are checks
        raise unreadable(source, error, "its config.json: ") from error
    if adapter:  # transformers would put it into the model, whatever model it is of
        raise _is_adapter(source, Path(adapter).name)
    _check_values(source, config)
    if "gguf_file" not in where:
        quantised.check(source, config, makes_dense=makes_dense)
        if quantised.packed_as(config):  # `read_model` makes it dense
            del config.quantization_config
    elif source.in_nf4:
        raise UserError(
            "--quantize nf4 and a GGUF file: give the model that the file was made from"
        )
    if other := getattr(config, "transformers_weights", None):
        raise UserError(
            f"{source.name}: its config.json has the weights in {shortened(str(other), 80)} "
            f"(transformers_weights): call that file {WEIGHTS[0][0]} and leave the name out"
        )
    # A kernel of the hub, which would be downloaded and run; a layout over GPUs.
    config._attn_implementation = config._experts_implementation = None
    vars(config).pop("distributed_config", None)
    return config


def _is_adapter(source: ModelSource, file: str) -> UserError:
    return UserError(
        f"{source.flag} {source.name} holds an adapter ({file}) and a run takes whole models, or "
        "trains new adapters: merge it into its model first (longctx merge)"
    )


def _check_values(source: ModelSource, config: PretrainedConfig) -> None:
    """Raises UserError for values of which no model can be made, or none in any memory: not every
    configuration looks at its values."""
    check_sizes(str(source.name), config)
    named = getattr(config, "architectures", None) or []
    if not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise UserError(
            f"{source.name}: its config.json has architectures {shortened(repr(named), 40)}: "
            "a list of names of classes is needed"
        )
    dropout = getattr(config, "attention_dropout", None) or 0.0
    if not 0 <= dropout < 1:
        raise UserError(f"{source.name}: its config.json drops {dropout} of attention")


def read_model(
    source: ModelSource,
    config: PretrainedConfig,
    *,
    dtype: Any,
    attention: str | None,
    head_follows: bool = False,
    **more: Any,
) -> Any:
    """Returns the model with all weights of its files; `dtype` may be "auto", the files' own.
    Says if a model of rewards starts with a random head, unless an adapter's takes its place
    (`head_follows`). Raises UserError where a weight is missing or damaged."""
    name, where = _pretrained(source)
    of_files = config if "gguf_file" in where else quantised.of_files(name, config)
    packed = quantised.packed_as(of_files)
    stays = quantised.stays_packed(source, of_files)
    if packed and not stays:
        config, more = of_files, more | quantised.made_dense(packed)
    with _explained(source):
        files = _weight_files(name, where)
        tensors = check_files(files, "NF4" if holds_nf4(config) else packed)
        refuse_without_experts(str(source.name), tensors, experts_of(config))
        if stays:
            more |= quantised.kept(files, of_files, dtype)
        elif packed == "FP8":
            quantised.check_blocks(files, of_files)
        with hidden_report(REWARD_HEAD):
            loaded: Any = auto_class(config).from_pretrained(
                name,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                output_loading_info=True,
                generation_config=_generation(source, config),
                **where,
                **more,
            )
    model, found = loaded
    if quantizer := getattr(model, "hf_quantizer", None):
        found["mismatched_keys"] |= _other_shapes(model, config, quantizer)
    if is_classifier(config) and REWARD_HEAD in found["missing_keys"]:
        found["missing_keys"] -= {REWARD_HEAD}
        if not head_follows:
            print_rank0(
                f"{source.name} is no model of rewards yet: its head of one number starts random"
            )
    if stays:
        quantised.refuse_outside(str(source.name), found["unexpected_keys"])
    gguf = unread_of_gguf(Path(name, where["gguf_file"]), model) if "gguf_file" in where else []
    refuse_partial(str(source.name), model, found, beside=gguf)
    forget_tie(model)
    if stays:
        with _explained(source):
            quantised.keep_packed_(model, str(source.name), str(packed))
    if "gguf_file" in where or packed:
        forget_packed(model)
    if packed and not stays:
        quantised.made_dense_(model, str(source.name), packed, dtype)
    return model


def _other_shapes(model: Any, config: PretrainedConfig, quantizer: Any) -> set[Any]:
    """Returns the weights that a quantizer has read in another shape than the configuration's, each
    name with both shapes: transformers 5.17 looks at none of them."""
    expected = getattr(quantizer, "shapes", None)
    if expected is None and (skeleton := without_storage(config)) is not None:
        expected = {name: whole_shape(p) for name, p in skeleton.named_parameters()}
    found = {name: whole_shape(p) for name, p in model.named_parameters()}
    return {
        (name, shape, expected[name])
        for name, shape in found.items()
        if expected and shape != expected.get(name, shape)
    }


def files_of(source: ModelSource, config: PretrainedConfig) -> tuple[list[Path], dict[str, Any]]:
    """Returns a model's files of weights and what they say of quantisation."""
    name, where = _pretrained(source)
    return _weight_files(name, where), quantised.quantization(quantised.of_files(name, config))


@contextmanager
def _explained(source: ModelSource) -> Iterator[None]:
    """Turns what reading a model's files raises into a UserError."""
    try:
        yield
    except (torch.OutOfMemoryError, UserError):
        raise
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{source.name} holds a file that is damaged or would run code when "
            "read; nothing of it was run"
        ) from error
    except Exception as error:  # a file's values raise as many types as there are
        raise unreadable(source, error) from error


def packed_files(source: ModelSource, config: PretrainedConfig) -> quantised.PackedFiles | None:
    """Returns the packed weights in the files of `config`'s model, or in a preset's public files,
    of which the configuration itself says nothing; None for all others, and for files that are not
    here."""
    if source.name is None:
        return quantised.PackedFiles.of(source, quantised.of_preset(source.preset, config))
    if source.name.endswith(".gguf"):
        return None
    try:
        found = quantised.of_files(_pretrained(source)[0], config)
        return quantised.PackedFiles.of(source, found)
    except OSError:
        return None


def _generation(source: ModelSource, config: PretrainedConfig) -> GenerationConfig | None:
    """Returns the configuration of generation; None if transformers can read the model's own. If it
    refuses to, training need not: a new one takes its place, and the run says so."""
    name, where = _pretrained(source)
    if "gguf_file" in where:
        return None
    try:
        GenerationConfig.from_pretrained(name)
    except OSError:  # most base models have none
        return None
    except Exception as error:  # each of transformers' checks has a type of its own
        print_rank0(f"{name}: its generation_config.json is left out ({one_line(error, 200)})")
        return GenerationConfig.from_model_config(config)
    return None


def unreadable(source: ModelSource, error: Exception, where: str = "") -> UserError:
    reason = where + one_line(error)
    if "custom code" in reason:
        reason = (
            "it ships code of its own, which runs with --trust_remote_code alone: read it first"
        )
    here = os.path.exists(expanded(source.name or ""))
    name = f"{source.name}{'' if here else ', a hub id: no such folder is here'}"
    return UserError(f"cannot load a model from {name}: {reason}")


def _pretrained(source: ModelSource) -> tuple[str, dict[str, Any]]:
    """Returns `from_pretrained`'s arguments: a folder or hub id, and keywords of a GGUF file."""
    name = source.name
    assert name is not None
    where: dict[str, Any] = {"trust_remote_code": source.trust_remote_code}
    if name.endswith(".gguf"):
        path = expanded(name)
        if not os.path.isfile(path):
            raise UserError(f"no such GGUF file: {name}")
        if not installed("gguf"):
            raise UserError(f"{name} needs the gguf package: {pip_install('gguf')}")
        return str(path.parent), {**where, "gguf_file": path.name}
    folder = expanded(name)
    if os.path.isdir(folder):
        if not os.path.isfile(folder / "config.json"):
            if os.path.isfile(folder / ADAPTER_CONFIG_NAME):
                raise _is_adapter(source, ADAPTER_CONFIG_NAME)
            refuse_run(name, folder)
            raise UserError(f"{source.flag} {name} has no config.json: it holds no model")
        refuse_odd(folder)
        return str(folder), where
    if os.path.exists(folder) or name.startswith((".", "/", "~")):
        raise UserError(f"{source.flag} {name} is no folder: give a model's folder or hub id")
    if name.count("/") > 1:  # an address too
        raise UserError(
            f"{source.flag} {name} is no folder here and no hub id, which has one / at most"
        )
    return name, where


def _weight_files(name: str, where: dict[str, Any]) -> list[Path]:
    """Returns the files that `from_pretrained` reads with these arguments; of a GGUF file none,
    whose integers are weights that it says how to compute."""
    if "gguf_file" in where:
        return []
    return weight_files(Path(name)) if os.path.isdir(name) else fetched_files(name)


def forget_packed(model: Any) -> None:
    """Weights of a GGUF file, of MXFP4 and of FP8 are made dense on loading, or are packed weights
    of ours, but the model still says that it is quantised, and then can be neither trained nor
    saved."""
    model.is_quantized = False
    for owner, name in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(owner, name):
            delattr(owner, name)


def weights_identity(source: ModelSource, config: PretrainedConfig) -> str | None:
    """Returns what tells a model's weights from others of the same configuration: the checksum of
    all its files of weights, or a hub model's commit. None for a preset, whose seed decides them,
    and for a hub model without a commit.

    Files are read once, which their loading then need not: 13 GB/s a thread from memory. The same
    weights cut into other files are others. Raises UserError for files that cannot be read.
    """
    if source.name is None:
        return None
    name, where = _pretrained(source)
    if not os.path.isdir(name):
        commit = getattr(config, "_commit_hash", None)
        return None if commit is None else f"commit {commit}"
    try:
        gguf = [Path(name, where["gguf_file"])] if "gguf_file" in where else []
        found = checksums(gguf or weight_files(Path(name)), f"Checking {name}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise unreadable(source, error) from error
    return f"xxh3 {xxhash.xxh3_64(' '.join(found).encode()).hexdigest()}"


def computed_by(config: PretrainedConfig) -> dict[str, Any]:
    """Returns what a configuration says of the numbers that its model computes."""
    return {k: v for k, v in config.to_dict().items() if k not in _NOT_COMPUTED}


_NOT_COMPUTED = {"transformers_version", "_name_or_path", "use_cache", "dtype", "torch_dtype"}
