# Declares _columns.h, the structures of columns in a growing batch, for the compiled modules.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "_columns.h" nogil:
    enum:
        SLACK
        CONVERTER_COUNT
        SYNTAX_COUNT "PGF_SYNTAX_COUNT"
        SLOW, SKIP, FORM, END
    enum:
        PGF_FIXED, PGF_VARIABLE, PGF_LIST, PGF_FIXED_LIST, PGF_STRUCT
    enum:
        INSERT "PGF_INSERT"
        UPDATE "PGF_UPDATE"
        DELETE "PGF_DELETE"
        TRUNCATE "PGF_TRUNCATE"
        OP "PGF_OP"
        OLD_KEY "PGF_OLD_KEY"
        OLD_ROW "PGF_OLD_ROW"
        IN_STREAM "PGF_IN_STREAM"
        HAS_XID "PGF_HAS_XID"
        HAS_COMMIT "PGF_HAS_COMMIT"
        HAS_AFTER "PGF_HAS_AFTER"
        CACHED "PGF_CACHED"
        CACHED_BY "PGF_CACHED_BY"
    const int64_t SHIFT "PGF_SHIFT"

    ctypedef struct LabelTable "pgf_labels":
        int32_t count
        uint32_t mask
        int32_t *ends
        uint8_t *text
        int32_t *slots
    int32_t *slot_of "pgf_slot"(
        const LabelTable *labels, const uint8_t *at, size_t length
    ) noexcept

    ctypedef struct Column "pgf_column":
        uint8_t kind
        uint8_t code
        uint8_t[2] codes
        uint8_t form
        uint8_t[2] form_codes
        int32_t width
        uint32_t scale
        uint8_t *validity
        uint8_t *data
        int32_t *offsets
        int64_t room
        uint64_t limit
        const void *labels  # a LabelTable
        void *part  # a Part
        void *field
    int64_t roomy "pgf_roomy"(int64_t size) noexcept
    void put_null "pgf_set_null"(Column *column, int64_t row) noexcept
    void put_nulls "pgf_set_nulls"(Column *column, int64_t start, int64_t end) noexcept
    void flag_bits "pgf_flag_bits"(
        uint8_t *bits, const uint8_t *flags, int64_t count, uint8_t mask
    ) noexcept

    ctypedef struct Part "pgf_part":
        uint8_t shape
        int32_t width
        int32_t n_children
        Part *children
        const LabelTable *labels
        uint8_t syntax
        uint8_t delimiter
        uint8_t[2] codes
        uint32_t type_id
        Column cell
        int32_t[2] cell_ends
        int64_t count, nulls, room, data_room
        uint8_t *validity
        uint8_t *data
        int32_t *offsets

    ctypedef struct Side "pgf_side":
        Column *columns
        int64_t filled
        int64_t capacity
    ctypedef struct Rows "pgf_rows":
        void *owner
        bint wanted
        int32_t width
        int64_t count, limit, capacity
        int64_t bytes, fixed, side_fixed
        bint truncated, has_before
        uint8_t *flags
        uint8_t *xids
        uint8_t *subxids
        uint64_t *lsns
        uint64_t *commit_lsns
        int64_t *commit_times
        int64_t *seqs
        Side before, after
        int32_t *unchanged_ends
        int64_t unchanged_filled
        int32_t *unchanged
        int64_t unchanged_count, unchanged_bytes
        int64_t unchanged_room
        const char **names
        Part *parts
        Py_ssize_t blocks
        int64_t usual, reserved
        int64_t *usual_bytes
        int64_t *form_rows
    ctypedef struct Cached "pgf_cached":
        uint64_t header
        Rows *rows
    ctypedef struct Stream "pgf_stream":
        bint wide, in_stream, in_transaction, has_commit
        uint32_t open_xid, xid
        uint64_t commit_lsn
        int64_t commit_time, seq, held, max_bytes
        Cached[256] cached
    uint64_t header_of "pgf_header"(uint32_t relation_id, int32_t width) noexcept
    void settle "pgf_settle"(Stream *stream) noexcept
