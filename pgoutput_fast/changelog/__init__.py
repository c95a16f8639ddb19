"""The change log: a directory that one capture writes, and any number of processes read.

`view` says what there is and what a reader reads next, `changes` decodes it. The package also has
snapshots, the schema history, consumers, merging, retention and uploads.
"""

from __future__ import annotations
