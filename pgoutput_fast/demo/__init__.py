"""The whole path on one machine: a server, its changes, Spark's tables, and the proof."""
