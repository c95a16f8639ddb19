"""The demo: tables that follow a server under load, are killed, and are compared with it."""
