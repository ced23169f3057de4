"""Text becomes training rows: documents, tokens, packed rows of `seq_len`, cached."""
