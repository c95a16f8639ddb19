"""What a running capture, sync or query shows of itself: numbers, metrics, and lines of a log."""
