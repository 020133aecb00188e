"""Codecs: encoders of a state, or of its difference from another, as bytes, and their decoders.

In: tensors by name, as bits. Out: segments of encoded bytes; and the reverse. Callers use `entry`.
"""
