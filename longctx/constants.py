"""Numbers that all rooms share, the version, and the name of the distribution."""

from __future__ import annotations

__version__ = "0.2.0.dev0"
"""The one home of the version (setup.py, pyproject.toml)."""
__distribution__ = "longctx-train"
"""The name under which pip installs this project; pyproject.toml repeats it. The import and the
command are called `longctx`, a name that belongs to another project on the public index."""
GIB = 2**30
"""Bytes of a GiB."""
IGNORE_INDEX = -100
"""The label of a token that is not trained, as in torch and Hugging Face."""
VOCAB_SIZE = 8192
"""Tokens of the tokenizer that longctx trains itself where a model has none."""
PAD_TOKEN_ID = 0
"""Fills up rows where a batch is made. Padding is trained nowhere and nothing attends to it, so any
id will do that every model knows."""
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
"""A vision-language model's arguments that are 0 where a token is of text."""
