# Declares _wire.h, which reads the bytes of frames, for the compiled modules.

from libc.stdint cimport int32_t, uint8_t, uint32_t

cdef extern from "_wire.h" nogil:
    enum:
        MAX_FRAME "PGF_MAX_FRAME"
        MAX_COLUMNS "PGF_MAX_COLUMNS"
        XID "PGF_XID"
        XID_SIZE "PGF_XID_SIZE"
        BEGIN_FINAL_LSN "PGF_BEGIN_final_lsn"
        BEGIN_COMMIT_TIME "PGF_BEGIN_commit_time"
        BEGIN_XID "PGF_BEGIN_xid"
        BEGIN_LENGTH "PGF_BEGIN_end"
        COMMIT_FLAGS "PGF_COMMIT_flags"
        COMMIT_LSN "PGF_COMMIT_commit_lsn"
        COMMIT_END_LSN "PGF_COMMIT_end_lsn"
        COMMIT_TIME "PGF_COMMIT_commit_time"
        COMMIT_LENGTH "PGF_COMMIT_end"
        ROW_RELATION_ID "PGF_ROW_relation_id"
        ROW_MARKER "PGF_ROW_marker"
        ROW_TUPLE "PGF_ROW_tuple"
        ROW_COLUMNS "PGF_ROW_columns"
        TUPLE_HEAD "PGF_TUPLE_HEAD"
        VALUE_HEAD "PGF_VALUE_HEAD"
        RELATION_ID "PGF_RELATION_relation_id"
        TRUNCATE_RELATION_COUNT "PGF_TRUNCATE_relation_count"
        TRUNCATE_OPTIONS "PGF_TRUNCATE_options"
        TRUNCATE_RELATION_IDS "PGF_TRUNCATE_relation_ids"
        MESSAGE_LSN "PGF_MESSAGE_lsn"
        MESSAGE_PREFIX "PGF_MESSAGE_prefix"
        STREAM_START_XID "PGF_STREAM_START_xid"
        STREAM_COMMIT_XID "PGF_STREAM_COMMIT_xid"
        STREAM_ABORT_XID "PGF_STREAM_ABORT_xid"
        BEGIN_PREPARE_XID "PGF_BEGIN_PREPARE_xid"
        PREPARE_XID "PGF_PREPARE_xid"
        STREAM_PREPARE_XID "PGF_STREAM_PREPARE_xid"
        COMMIT_PREPARED_XID "PGF_COMMIT_PREPARED_xid"
        ROLLBACK_PREPARED_XID "PGF_ROLLBACK_PREPARED_xid"
    ctypedef struct ColumnSlice "pgf_slice":
        uint32_t offset
        uint32_t length_and_kind
    enum:
        KIND_NULL "PGF_KIND_NULL"
        KIND_UNCHANGED "PGF_KIND_UNCHANGED"
        KIND_TEXT "PGF_KIND_TEXT"
        KIND_BINARY "PGF_KIND_BINARY"
    const uint8_t *read_slices "pgf_read_slices"(
        const uint8_t *frame, const uint8_t *at, const uint8_t *end, ColumnSlice *slice,
        uint32_t count
    ) noexcept
    Py_ssize_t walk_tuple "pgf_walk_tuple"(
        const uint8_t *frame, Py_ssize_t position, Py_ssize_t end, int32_t width
    ) noexcept
    Py_ssize_t take_column "pgf_take_column"(
        const uint8_t *frame, Py_ssize_t position, ColumnSlice *column
    ) noexcept
