"""Codecs: what turns a state, or its difference from another, into bytes and back. `entry` is the way in.

In: tensors by name, as bits. Out: segments of encoded bytes, at most as many as declared, and the reverse.
"""
