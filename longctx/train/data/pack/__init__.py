"""Documents and groups are packed into rows of `seq_len` tokens, which are kept on disk."""
