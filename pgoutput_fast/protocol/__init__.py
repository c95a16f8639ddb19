"""The wire format: the table of its messages, rare messages, encoding, headers of CopyData."""
