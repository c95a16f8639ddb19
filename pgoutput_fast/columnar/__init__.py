"""Decode many frames into typed Arrow record batches, without a Python object for each row.

:class:`ColumnarDecoder` returns a batch for each table and layout. An engine converts the values:
the compiled one, or its twin in Python. :func:`decode_batch` returns NumPy arrays of headers
instead, and the positions of columns.
"""
