"""Decode the types of full text search, tsvector and tsquery, to str: the server's texts."""

from __future__ import annotations

import re
import struct

from .base import Codec, CodecOf, show_bytes

_QUOTED = r"'[^'\\]*(?:(?:''|\\\\)[^'\\]*)*'"
_LEXEME = rf"{_QUOTED}(?::[0-9]{{1,5}}[ABC]?(?:,[0-9]{{1,5}}[ABC]?)*)?"
_VECTOR = rf"(?:{_LEXEME}(?: {_LEXEME})*)?"
_OPERAND = rf"(?:!|\( )*{_QUOTED}(?::(?=[*A-D])\*?A?B?C?D?)?(?: \))*"
_OPERATOR = r" (?:[&|]|<(?:-|[0-9]{1,5})>) "
_QUERY = rf"(?:{_OPERAND}(?:{_OPERATOR}{_OPERAND})*)?"
_PARENTHESES = rf"{_QUOTED}|([()])"


def _quoted(lexeme: str) -> str:
    if "'" in lexeme or "\\" in lexeme:
        lexeme = lexeme.replace("\\", "\\\\").replace("'", "''")
    return f"'{lexeme}'"


def _lexeme(raw: bytes, start: int, encoding: str) -> tuple[str, int]:
    """The lexeme that begins at byte `start`, and the position after the NUL that ends it."""
    end = raw.find(b"\0", start)
    if end < 0:
        raise ValueError(f"a lexeme without the NUL that ends it: {show_bytes(raw[start:])}")
    return raw[start:end].decode(encoding), end + 1


_int32 = struct.Struct(">i").unpack_from
_uint16 = struct.Struct(">H").unpack_from
_WEIGHTS = ("", "C", "B", "A")


def _vector(encoding: str) -> Codec:
    def text(raw: bytes) -> str:
        value = raw.decode(encoding)
        if re.fullmatch(_VECTOR, value) is None:
            raise ValueError(f"{show_bytes(raw)} is no tsvector")
        return value

    def form(raw: bytes) -> str:
        """The server's text of a binary tsvector.

        Binary format: int32 number of lexemes; for each its bytes, a NUL, an uint16 number of
        positions, and the positions, uint16 each, with the weight in the two highest bits.
        """
        shown = []
        try:
            count: int = _int32(raw, 0)[0]
            offset = 4
            # Each lexeme takes at least three bytes.
            if not 0 <= count <= len(raw) // 3:
                raise ValueError(f"a binary tsvector of {count} lexemes in {len(raw)} bytes")
            for _ in range(count):
                lexeme, offset = _lexeme(raw, offset, encoding)
                marks = _uint16(raw, offset)[0]
                positions = struct.unpack_from(f">{marks}H", raw, offset + 2)
                offset += 2 + 2 * marks
                item = _quoted(lexeme)
                if positions:
                    item += ":" + ",".join([f"{p & 0x3FFF}{_WEIGHTS[p >> 14]}" for p in positions])
                shown.append(item)
        except struct.error:
            raise ValueError(f"a binary tsvector that ends too early: {show_bytes(raw)}") from None
        if offset != len(raw):
            raise ValueError(f"a binary tsvector with {len(raw) - offset} bytes after its end")
        return " ".join(shown)

    return Codec(text, form, form)


_VALUE, _OPERATION = 1, 2
_WEIGHT_BITS = ((8, "A"), (4, "B"), (2, "C"), (1, "D"))
_NOT, _AND, _OR, _PHRASE = 1, 2, 3, 4
_PRIORITY = {_NOT: 4, _AND: 2, _OR: 1, _PHRASE: 3}


class _Operation:
    """An operator of a tsquery with its operands, each an operation or the text of a lexeme."""

    __slots__ = ("left", "operator", "right", "sign")

    def __init__(self, operator: int, sign: str) -> None:
        self.operator = operator
        self.sign = sign
        self.left: _Operation | str = ""
        self.right: _Operation | str = ""


def _query_items(raw: bytes, encoding: str) -> list[_Operation | str]:
    """The items of a binary tsquery in their order: operators without operands, texts of lexemes.

    Binary format: int32 number of items; for each an int8 kind. A lexeme follows with int8 weights,
    int8 whether it is a prefix, its bytes and a NUL; an operator with an int8 that says which, and
    for ``<->`` an uint16 distance.
    """
    items: list[_Operation | str] = []
    try:
        count: int = _int32(raw, 0)[0]
        offset = 4
        if not 0 <= count <= len(raw) // 2:
            raise ValueError(f"a binary tsquery of {count} items in {len(raw)} bytes")
        for _ in range(count):
            kind = raw[offset]
            if kind == _VALUE:
                weights, prefix = raw[offset + 1], raw[offset + 2]
                if weights > 15 or prefix > 1:
                    raise ValueError(f"a binary tsquery with weights {weights}, prefix {prefix}")
                lexeme, offset = _lexeme(raw, offset + 3, encoding)
                item = _quoted(lexeme)
                if weights or prefix:
                    letters = "".join([c for bit, c in _WEIGHT_BITS if weights & bit])
                    item += ":" + "*" * prefix + letters
                items.append(item)
            elif kind == _OPERATION:
                operator = raw[offset + 1]
                offset += 2
                sign = {_NOT: "!", _AND: " & ", _OR: " | "}.get(operator, "")
                if operator == _PHRASE:
                    distance = _uint16(raw, offset)[0]
                    offset += 2
                    sign = " <-> " if distance == 1 else f" <{distance}> "
                elif not sign:
                    raise ValueError(f"a binary tsquery with the operator {operator}")
                items.append(_Operation(operator, sign))
            else:
                raise ValueError(f"a binary tsquery with an item of kind {kind}")
    except (struct.error, IndexError):
        raise ValueError(f"a binary tsquery that ends too early: {show_bytes(raw)}") from None
    if offset != len(raw):
        raise ValueError(f"a binary tsquery with {len(raw) - offset} bytes after its end")
    return items


def _query_tree(items: list[_Operation | str]) -> _Operation | str:
    """The tree of a query's items, where an operator precedes its right, then its left operand."""
    stack: list[_Operation | str] = []
    for item in reversed(items):
        if isinstance(item, _Operation):
            if len(stack) < 1 + (item.operator != _NOT):
                raise ValueError("a binary tsquery with an operator that lacks an operand")
            item.right = stack.pop()
            if item.operator != _NOT:
                item.left = stack.pop()
        stack.append(item)
    if len(stack) != 1:
        raise ValueError(f"a binary tsquery with {len(stack)} operands that no operator joins")
    return stack[0]


def _parts(operation: _Operation) -> list[_Operation | str]:
    """The parts of an operation's text, in which operands that are operations are not yet text."""
    priority = _PRIORITY[operation.operator]

    def operand(part: _Operation | str, right_of_phrase: bool) -> list[_Operation | str]:
        if isinstance(part, str):
            return [part]
        if _PRIORITY[part.operator] < priority or (right_of_phrase and part.operator == _PHRASE):
            return ["( ", part, " )"]
        return [part]

    right = operand(operation.right, operation.operator == _PHRASE)
    if operation.operator == _NOT:
        return [operation.sign, *right]
    return [*operand(operation.left, False), operation.sign, *right]


def _query(encoding: str) -> Codec:
    def text(raw: bytes) -> str:
        value = raw.decode(encoding)
        if re.fullmatch(_QUERY, value) is not None:
            depth = 0
            for parenthesis in (
                re.findall(_PARENTHESES, value) if "(" in value or ")" in value else ()
            ):
                depth += (parenthesis == "(") - (parenthesis == ")")
                if depth < 0:
                    break
            if not depth:
                return value
        raise ValueError(f"{show_bytes(raw)} is no tsquery")

    def form(raw: bytes) -> str:
        items = _query_items(raw, encoding)
        if not items:
            return ""
        # A stack of the parts to be printed replaces recursion, as a query can be thousands of
        # levels deep.
        waiting = [_query_tree(items)]
        shown = []
        while waiting:
            part = waiting.pop()
            if isinstance(part, str):
                shown.append(part)
            else:
                waiting.extend(reversed(_parts(part)))
        return "".join(shown)

    return Codec(text, form, form)


CODECS: dict[str, CodecOf] = {
    "tsvector": lambda policies, encoding: _vector(encoding),
    "tsquery": lambda policies, encoding: _query(encoding),
}
