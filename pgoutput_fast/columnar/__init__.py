"""Decode many frames into typed Arrow record batches, without a Python object for each row."""
