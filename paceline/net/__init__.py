"""Net: bytes over TCP that are not trusted before they have been checked.

`frames` are messages of fixed schemas with raw tensors after them, `secure` is tokens, keys and TLS. Nothing here
knows what is said.
"""
