"""The benchmark of rows with frames, on tiny sizes and a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_families import SIZES

from profiling.bench import images_bench

pytestmark = pytest.mark.usefixtures("reference_kernels")
pytest.importorskip("peft")


def small() -> dict[str, Any]:
    sizes = images_bench.QWEN3_VL_8B
    text = {**sizes["text_config"], **SIZES, "vocab_size": 1100, "head_dim": 128}
    vision = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2)
    vision |= dict(out_hidden_size=SIZES["hidden_size"], deepstack_visual_indexes=[0])
    return {
        **sizes,
        "video_token_id": 1001,
        "text_config": text,
        "vision_config": {**sizes["vision_config"], **vision},
    }


@pytest.mark.parametrize(
    "side, states, kept",
    [
        ("custom", "torch", {}),
        ("custom", "exact", {}),
        ("vanilla", "torch", dict(checkpointing="layers", offload="all")),
        ("vanilla", "torch", dict(checkpointing="selective", adapters="bf16")),
    ],
)
@pytest.mark.parametrize("tower", [False, True])
def test_a_row_of_frames(side, states, kept, tower) -> None:
    case = dict(side=side, states=states, frames=4, pixels=64, tower=tower, **kept)
    case = images_bench.BENCH.case(case)
    row = images_bench.measured(case, small(), "cpu", torch.float32, 1)
    assert row["status"] == "ok" and row["tokens"] == 2 * (8 + 4) + 8
    assert row["step_s"] > 0 and row["tower"] is tower


def test_in_4_bits() -> None:
    """The case of an hour of video has a language model whose layers are in 4 bits."""
    pytest.importorskip("bitsandbytes")
    case = images_bench.BENCH.case(images_bench.HOUR | dict(frames=4, pixels=64, gpu_gib=0))
    row = images_bench.measured(case, small(), "cpu", torch.float32, 1)
    assert row["status"] == "ok" and row["quantize"] == "nf4" and row["step_s"] > 0


def test_published_cases_name_all_that_differs() -> None:
    cases = images_bench.BENCH.cases(None)
    assert len({tuple(case.items()) for case in cases}) == len(cases) == 8
