"""A tiny Llama with random weights and a tokenizer of bytes: made on the spot, for first steps.

The notebooks train it where no model is named, on any machine and without a download.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with a token for each byte, `<end>` and `<pad>`: 258 in all."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token="<end>", pad_token="<pad>"
    )


def tiny_llama_and_tokenizer() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Returns a Llama of 2 layers, hidden size 64 and 131072 positions, in fp32, with its
    tokenizer. The weights are random: `transformers.set_seed` makes them the same again."""
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=131072,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config), tokenizer
