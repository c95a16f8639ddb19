"""Decode frames of PostgreSQL's pgoutput plugin into messages with typed values.

>>> import pgoutput_fast as pf
>>> pf.decode(bytes.fromhex("45"))
StreamStop()

`IMPLEMENTATION` names the loaded implementation, "cython" or "python". `FALLBACK_REASON` says why
the compiled one could not be loaded, or is None.

The subpackage `pgoutput_fast.testing` is for tests. It is imported when it is first used.
"""

from __future__ import annotations

import typing as _typing

from ._impl import FALLBACK_REASON, IMPLEMENTATION
from ._impl import implementation as _implementation
from ._impl import twin as _twin
from ._version import __version__
from .columnar.arrays import FrameBatch
from .columnar.decoder import (
    BadFrame,
    ChangeStream,
    ColumnarDecoder,
    ErrorBatch,
    Event,
    Events,
    decode_batch,
)
from .errors import DecodeError, PgOutputError
from .json_values import json_default
from .lsn import format_lsn, parse_lsn
from .objects import UNCHANGED, Array, Interval, Range, SparseVector
from .policies import Policies
from .protocol.messages import (
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
from .protocol.wire import Column
from .types import TypeRegistry

if _typing.TYPE_CHECKING:
    from . import testing as testing
    from .columnar._pure_batch import ChangeBatch
    from .decoding._pure import Begin, Commit, Decoder, Delete, Insert, TupleData, Update, decode
else:
    Begin = _implementation.Begin
    Commit = _implementation.Commit
    Insert = _implementation.Insert
    Update = _implementation.Update
    Delete = _implementation.Delete
    TupleData = _implementation.TupleData
    Decoder = _implementation.Decoder
    decode = _implementation.decode

__all__ = [
    "FALLBACK_REASON",
    "IMPLEMENTATION",
    "UNCHANGED",
    "Array",
    "BadFrame",
    "Begin",
    "BeginPrepare",
    "ChangeBatch",
    "ChangeStream",
    "Column",
    "ColumnarDecoder",
    "Commit",
    "CommitPrepared",
    "DecodeError",
    "Decoder",
    "Delete",
    "ErrorBatch",
    "Event",
    "Events",
    "FrameBatch",
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
    "json_default",
    "parse_lsn",
]

_NEEDS: dict[str, tuple[str, ...]] = {
    "apply": ("pyarrow",),
    "catalog": (),
    "embedded": (),
    "replication": ("psycopg",),
    "segments": (),
    "spark": ("pandas", "pyarrow", "pyspark"),
    "testing": (),
    "transactions": (),
    "transcode": (),
}
"""Submodules for users, which are imported at first access, and the packages of an extra without
which that fails."""


def _belongs_here(thing: _typing.Any) -> None:
    """Set `__module__` of a class or function to this package, in place of its own module.

    So pickles of classes load with either implementation, and help() shows the name that users
    import.
    """
    if callable(thing):
        try:
            thing.__module__ = __name__
        except TypeError:
            pass  # a compiled class, whose __module__ is this package already


if not _typing.TYPE_CHECKING:  # with __getattr__, type checkers would accept any name

    def __getattr__(name: str) -> object:
        if name in _NEEDS:
            import importlib

            return importlib.import_module(f"{__name__}.{name}")
        if name == "ChangeBatch":  # its module imports NumPy
            batch_class = _twin("columnar._batch").ChangeBatch
            _belongs_here(batch_class)
            globals()[name] = batch_class
            return batch_class
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    # help() gets every name that is listed. So submodules that cannot be imported are left out.
    from importlib.util import find_spec

    importable = (name for name, needed in _NEEDS.items() if all(map(find_spec, needed)))
    return sorted([*__all__, *importable])


for _name in __all__:
    if _name != "ChangeBatch":
        _belongs_here(globals()[_name])
