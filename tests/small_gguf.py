"""A GGUF file of a tiny Llama, for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


def write_gguf(path: Path, layers: int = 1, more: dict[str, tuple[int, ...]] | None = None) -> None:
    """A GGUF file of a tiny Llama with unquantised tensors, as llama.cpp names them, and `more`."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(331)
    shapes = {"token_embd": (331, 64), "output_norm": (64,), "output": (331, 64)}
    for i in range(layers):
        shapes |= {f"blk.{i}.attn_{n}": (64, 64) for n in ("q", "output")}
        shapes |= {f"blk.{i}.attn_{n}": (32, 64) for n in "kv"}
        shapes |= {f"blk.{i}.ffn_{n}": (96, 64) for n in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down": (64, 96)}
        shapes |= {f"blk.{i}.{n}_norm": (64,) for n in ("attn", "ffn")}
    for name, shape in {**shapes, **(more or {})}.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape, scale=0.1).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
