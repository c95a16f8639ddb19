"""Show how a running capture, sync or query is doing: numbers, metrics and log lines."""
