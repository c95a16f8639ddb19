"""The demo: sync a private PostgreSQL server under load, kill the sync, and compare all rows.

The command `pgoutput-fast demo` runs it, and writes an HTML report.
"""
