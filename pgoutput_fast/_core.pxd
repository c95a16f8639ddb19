# The C structures and walks that compiled modules share.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "_frames.h" nogil:
    ctypedef struct ColumnSlice "pgf_slice":
        uint32_t offset
        uint32_t length_and_kind
    enum:
        KIND_NULL "PGF_KIND_NULL"
        KIND_UNCHANGED "PGF_KIND_UNCHANGED"
        KIND_TEXT "PGF_KIND_TEXT"
        KIND_BINARY "PGF_KIND_BINARY"
    const uint8_t *take_slices "pgf_take_slices"(
        const uint8_t *frame, const uint8_t *at, const uint8_t *end, ColumnSlice *slice,
        uint32_t count
    ) noexcept


# Shifts, not casts: frames are not aligned, and compilers make one byte swap of them.
cdef inline uint16_t load_uint16(const uint8_t *at) noexcept nogil:
    return <uint16_t> (<uint16_t> at[0] << 8 | at[1])


cdef inline uint32_t load_uint32(const uint8_t *at) noexcept nogil:
    return (<uint32_t> at[0] << 24 | <uint32_t> at[1] << 16
            | <uint32_t> at[2] << 8 | <uint32_t> at[3])


cdef inline uint64_t load_uint64(const uint8_t *at) noexcept nogil:
    return (<uint64_t> at[0] << 56 | <uint64_t> at[1] << 48 | <uint64_t> at[2] << 40
            | <uint64_t> at[3] << 32 | <uint64_t> at[4] << 24 | <uint64_t> at[5] << 16
            | <uint64_t> at[6] << 8 | <uint64_t> at[7])


# Where the tuple at `position` ends; -1 if it is malformed, or has not `width` columns (where that
# is not -1). Every read is preceded by its check: `end - position` never gets negative.
cdef inline Py_ssize_t walk_tuple(
    const uint8_t *frame, Py_ssize_t position, Py_ssize_t end, int32_t width
) noexcept nogil:
    cdef uint32_t count, length
    cdef uint8_t kind
    if end - position < 2:
        return -1
    count = load_uint16(frame + position)
    position += 2
    if count > 0x7FFF or (width >= 0 and count != <uint32_t> width):
        return -1
    while count > 0:
        count -= 1
        if position >= end:
            return -1
        kind = frame[position]
        if kind == c't' or kind == c'b':
            if end - position < 5:
                return -1
            length = load_uint32(frame + position + 1)
            position += 5
            # Unsigned: a negative length is longer than any frame.
            if length > <size_t> (end - position):
                return -1
            position += length
        elif kind == c'n' or kind == c'u':
            position += 1
        else:
            return -1
    return position


# The column at `position` of a tuple that walk_tuple has found sound; where the next one begins.
cdef inline Py_ssize_t take_column(
    const uint8_t *frame, Py_ssize_t position, ColumnSlice *column
) noexcept nogil:
    cdef uint8_t kind = frame[position]
    cdef uint32_t length
    if kind == c't' or kind == c'b':
        length = load_uint32(frame + position + 1)
        column.offset = <uint32_t> (position + 5)
        column.length_and_kind = length << 2 | (KIND_TEXT if kind == c't' else KIND_BINARY)
        return position + 5 + length
    column.offset = <uint32_t> (position + 1)
    column.length_and_kind = KIND_NULL if kind == c'n' else KIND_UNCHANGED
    return position + 1
