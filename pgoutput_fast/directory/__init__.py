"""What a capture's directory has beside its segments, and the rules that hold there.

Snapshots of tables, consumers and their positions, the merging of small segments, retention. Any
number of processes read a directory, one capture writes to it.
"""

from __future__ import annotations
