"""lm_head with what follows it, computed in pieces, so that the logits never exist as a whole."""
