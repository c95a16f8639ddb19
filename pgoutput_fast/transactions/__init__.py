"""Make whole transactions, in commit order, from frames of any protocol version.

An :class:`Assembler` stages streamed and prepared transactions until they end, and drops those that
are rolled back. It does no network I/O; large open transactions go to temporary files.
"""

from __future__ import annotations

from .assembler import Assembler
from .transaction import Transaction, TransactionGroup

__all__ = ["Assembler", "Transaction", "TransactionGroup"]
