"""One call of a model: documents, positions, padding and experts in its arguments, and the outputs
that its caller reads.
"""
