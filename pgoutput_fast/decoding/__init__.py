"""The decoder of single messages, in both implementations, and what it knows between them."""
