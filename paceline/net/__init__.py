"""Net: bytes over TCP that are not trusted before they have been checked.

`frames` are messages of fixed schemas with raw tensors after them, `secure` is tokens, keys and TLS, `strangers` are
those who have connected and not shown yet who they are. Nothing here knows what is said.
"""
