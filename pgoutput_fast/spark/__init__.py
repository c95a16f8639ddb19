"""PostgreSQL's changes as Spark DataFrames."""

from __future__ import annotations

from ._session import session

__all__ = ["session"]
