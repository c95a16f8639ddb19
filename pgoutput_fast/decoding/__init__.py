"""The decoder of single messages, in both implementations, and the state that it keeps."""
