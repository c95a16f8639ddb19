"""The demonstration: a server's changes become Spark's tables, which are compared with its own."""
