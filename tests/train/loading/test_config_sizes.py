"""Limits of the sizes in a config.json, by the names that they have in any part of it."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from longctx.errors import UserError
from longctx.train.loading.config_sizes import check_raw_sizes, check_sizes


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers 1000000: a whole number from 1 to 512"),
        ({"vision_config": {"depth": 10**6}}, "vision_config.depth 1000000: .* from 1 to 512"),
        ({"a": {"b": {"num_layers": 513}}}, "a.b.num_layers 513: a whole number from 0 to 512"),
        ({"backbone": {"depths": [2, 10**6]}}, "backbone.depths 1000000"),
        ({"mamba_chunk_size": 0}, "mamba_chunk_size 0: a whole number from 1 to 4096"),
        ({"chunk_size": 4194304}, "chunk_size 4194304: a whole number from 1 to 4096"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim 0: a whole number from 1"),
        ({"num_local_experts": 40000}, "num_local_experts 40000: a whole number from 0 to 16384"),
        ({"vision_config": {"num_heads": 2**60}}, "vision_config.num_heads 1152921504606846976"),
        ({"a_size_of_tomorrow": 10**9}, "a_size_of_tomorrow 1000000000"),
    ],
)
def test_a_number_beyond_the_limits_of_its_name_is_refused(found, message) -> None:
    with pytest.raises(UserError, match=f"M: its config.json has {message}"):
        check_raw_sizes("M", found)


def test_numbers_that_are_no_sizes_have_no_limits() -> None:
    check_raw_sizes(
        "M",
        dict(rope_theta=10**11, bos_token_id=10**7, max_position_embeddings=10**8, chunk_size=-1)
        | dict(vision_config={"window_size": 10**9, "depth": 32}, image_token_id=10**8)
        | dict(tie_word_embeddings=True, id2label={"0": "a"}, num_local_experts=0)
        | dict(quantization_config={"group_layers": 10**9}),
    )


@pytest.mark.parametrize("k", [0, 9, 10**6])
@pytest.mark.parametrize(
    ("family", "experts", "chosen"),
    [
        ("mixtral", "num_local_experts", "num_experts_per_tok"),
        ("qwen3_moe", "num_experts", "num_experts_per_tok"),
        ("deepseek_v3", "n_routed_experts", "num_experts_per_tok"),
    ],
)
def test_a_token_goes_to_some_of_the_experts(family, experts, chosen, k) -> None:
    config = AutoConfig.for_model(family, **{experts: 8, chosen: 2})
    check_sizes("M", config)
    setattr(config, chosen, k)
    with pytest.raises(UserError, match=f"{chosen} {k}: a token goes to 1 to 8 experts"):
        check_sizes("M", config)


def test_parts_have_sizes_that_are_positive() -> None:
    config = AutoConfig.for_model("qwen2_vl")
    check_sizes("M", config)
    config.vision_config.hidden_size = 0
    with pytest.raises(UserError, match="vision_config.hidden_size 0: a whole number from 1"):
        check_sizes("M", config)
