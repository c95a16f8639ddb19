"""Make whole transactions, in commit order, from frames of any protocol version; without I/O."""

from __future__ import annotations

from .assembler import Assembler
from .transaction import Transaction, TransactionGroup

__all__ = ["Assembler", "Transaction", "TransactionGroup"]
