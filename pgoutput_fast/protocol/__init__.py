"""Frames and messages: what their bytes are, and the ways there and back."""
