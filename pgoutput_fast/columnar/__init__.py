"""Many frames in, typed Arrow record batches out, without a Python object for each row."""
