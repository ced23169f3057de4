"""The program: `longctx train` and the other commands, over the library in the folders next to this
one.

The library never imports it (tests/test_rooms.py).
"""
