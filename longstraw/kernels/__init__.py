"""Arithmetic over pages: attention and token log-probs, each a fast version beside a naive one."""
