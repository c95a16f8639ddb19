"""The demonstration: a server's changes become Spark tables, compared with the server's."""
