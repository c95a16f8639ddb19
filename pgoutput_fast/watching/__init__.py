"""Show how a running capture, sync or query is doing: numbers, metrics and log lines.

`figures` and `sync_figures` compute lag and rates, `metrics` serves them to Prometheus, and `logs`
writes log lines as text or JSON.
"""
