"""Decode single messages, in two implementations that share the state between frames."""
