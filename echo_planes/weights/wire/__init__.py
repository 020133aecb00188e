"""Messages between nodes: frames, signed segment headers and manifests, credentials, limits of size.

Sans-I/O. In: bytes from the network. Out: checked messages, or a refusal with a reason.
"""
