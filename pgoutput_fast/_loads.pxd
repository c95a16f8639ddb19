# Declares _loads.h, which reads big-endian numbers, for the compiled modules.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef extern from "_loads.h" nogil:
    uint32_t load_uint16 "pgf_load2"(const uint8_t *at) noexcept
    uint32_t load_uint32 "pgf_load4"(const uint8_t *at) noexcept
    uint64_t load_uint64 "pgf_load8"(const uint8_t *at) noexcept
