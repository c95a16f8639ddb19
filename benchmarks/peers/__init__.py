"""What a user would take instead, each draining the same bytes from a real server: see drain.py."""
