"""PostgreSQL's pgoutput frames, decoded: messages, and values of PostgreSQL's types.

>>> import pgoutput_fast as pf
>>> pf.decode(bytes.fromhex("45"))
StreamStop()

`IMPLEMENTATION` tells which implementation was loaded, "cython" or "python"; `FALLBACK_REASON` is
None, or says why it is not the compiled one.

`pgoutput_fast.testing` is a subpackage for tests, imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from ._impl import FALLBACK_REASON, IMPLEMENTATION, implementation
from ._version import __version__
from .columnar.decoder import ChangeStream, ColumnarDecoder, decode_batch
from .errors import DecodeError, PgOutputError
from .lsn import format_lsn, parse_lsn
from .messages import (
    BeginPrepare,
    CommitPrepared,
    LogicalMessage,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
)
from .objects import UNCHANGED, Array, Interval, Range, SparseVector
from .policies import Policies
from .types import TypeRegistry
from .wire import Column

if TYPE_CHECKING:
    from . import testing as testing
    from ._pure import Begin, Commit, Decoder, Delete, Insert, TupleData, Update, decode
else:
    Begin = implementation.Begin
    Commit = implementation.Commit
    Insert = implementation.Insert
    Update = implementation.Update
    Delete = implementation.Delete
    TupleData = implementation.TupleData
    Decoder = implementation.Decoder
    decode = implementation.decode

__all__ = [
    "FALLBACK_REASON",
    "IMPLEMENTATION",
    "UNCHANGED",
    "Array",
    "Begin",
    "BeginPrepare",
    "ChangeStream",
    "Column",
    "ColumnarDecoder",
    "Commit",
    "CommitPrepared",
    "DecodeError",
    "Decoder",
    "Delete",
    "Insert",
    "Interval",
    "LogicalMessage",
    "Origin",
    "PgOutputError",
    "Policies",
    "Prepare",
    "Range",
    "Relation",
    "RollbackPrepared",
    "SparseVector",
    "StreamAbort",
    "StreamCommit",
    "StreamPrepare",
    "StreamStart",
    "StreamStop",
    "Truncate",
    "TupleData",
    "Type",
    "TypeRegistry",
    "Update",
    "__version__",
    "decode",
    "decode_batch",
    "format_lsn",
    "parse_lsn",
]


def __getattr__(name: str) -> object:
    """Import a subpackage that few need when it is first asked for."""
    if name == "testing":
        return _import_module(".testing", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
