"""One call of a model: what its arguments say of documents, positions, padding and routers, and
what its caller reads of it.
"""
