"""Text becomes training rows: documents, tokens, packed rows of `seq_len`, cached.

The folders stand on each other in the order reading, chat, pack, text; packed_rows.py and
streamed.py call them all.
"""
