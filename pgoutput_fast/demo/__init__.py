"""The demo: sync follows a server under load, is killed, and its tables are compared with it."""
