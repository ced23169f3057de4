"""Computes lm_head and the functions of its logits in pieces, so that the logits never exist as a
whole."""
