"""Decode single frames into messages, with a compiled `Decoder` and its twin in Python.

Both decoders share `StreamState`, which remembers relations, types and open transactions between
frames, and `RelationPlan`, which prepares how to decode the rows of a relation.
"""
