"""Native ops, which the CUDA build alone has: the experts block for a few tokens, and routing.

`backend` is the Triton backend with these ops in place of what they do.
"""
