"""The wire format of pgoutput, as one table that says which fields each message has.

Decoders and encoders follow this table. The package also decodes the rare messages, encodes frames,
and reads and writes the headers that a walsender puts around frames.
"""
