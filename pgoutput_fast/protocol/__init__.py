"""The wire format: its one table, the rare messages, encoding, and the headers of CopyData."""
