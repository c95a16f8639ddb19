# cython: annotation_typing=False
"""Follow the rows of a table from change to change, compiled. The twin of ``_pure_folder.py``.

A `Place` is a key that a change touched. A hash table with open addressing finds it. A `Tenant` is
a row, which moves to another place if a change gives it another key. Neither is a Python object.
The tenant of a deleted row is reused.
"""

from __future__ import annotations

import os

import numpy as np

cimport cython
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset

from pgoutput_fast.columnar._memory cimport Growing, room

from . import steps as codes
from .steps import Followed

cdef enum:
    INSERT = 0
    UPDATE = 1
    DELETE = 2

cdef enum:
    FITS = 0
    OCCUPIED = 1
    VACANT = 2
    NO_MEMORY = 3

cdef enum:
    UNKNOWN = -1

cdef enum:
    # Changes whose keys are prefetched together, so that their accesses to memory overlap.
    TOGETHER = 32

cdef extern from *:
    """
    #if defined(__GNUC__) || defined(__clang__)
    #define PGF_PREFETCH(address) __builtin_prefetch(address)
    #else
    #define PGF_PREFETCH(address) ((void)(address))
    #endif
    """
    void prefetch "PGF_PREFETCH"(const void *address) noexcept nogil

assert (INSERT, UPDATE, DELETE) == (codes.INSERT, codes.UPDATE, codes.DELETE)
assert (FITS, OCCUPIED, VACANT, UNKNOWN) == (
    codes.FITS, codes.OCCUPIED, codes.VACANT, codes.UNKNOWN
)


# A key: `number`, or `size` bytes at `at`.
cdef struct Key:
    int64_t number
    const uint8_t *at
    int64_t size


# Places and tenants are small, because a large transaction has one of each per key. The number of a
# change has 31 bits: see `MOST_CHANGES`.
cdef struct Place:
    int64_t key  # the integer, or the offset in Fold.bytes of the key's size and bytes
    uint32_t hash
    int32_t tenant  # UNKNOWN: no row has the key now
    int32_t last  # the last change of the key
    bint is_in_table  # whether the table had a row with the key before the first change


cdef struct Tenant:
    int32_t home  # the row's place before the first change; UNKNOWN for an inserted row
    int32_t row  # the last change that sent values
    int32_t origin  # the change that moved the row away from `home`, or deleted it
    int32_t vector  # index of its sources, which a reused tenant keeps; or UNKNOWN
    bint mixed  # whether the sources are valid: several changes sent the row's columns


cdef class _Keys:
    """The arrays of keys, readable without the interpreter."""

    cdef const int64_t[::1] numbers
    cdef const uint8_t[::1] data
    cdef const int64_t[::1] ends
    cdef bint integers

    cdef inline Key take(self, Py_ssize_t i) noexcept nogil:
        cdef Key key
        if self.integers:
            key.number, key.at, key.size = self.numbers[i], NULL, 0
        else:
            key.number, key.size = 0, self.ends[i + 1] - self.ends[i]
            key.at = &self.data[self.ends[i]] if key.size else NULL
        return key


cdef _Keys keys_of(object keys, bint integers, Py_ssize_t count):
    cdef _Keys result = _Keys.__new__(_Keys)
    cdef Py_ssize_t i
    result.integers = integers
    if integers:
        result.numbers = keys.values
        if result.numbers.shape[0] != count:
            raise ValueError("not as many keys as rows")
        return result
    result.data, result.ends = keys.values, keys.ends
    if result.ends.shape[0] != count + 1 or result.ends[0] < 0:
        raise ValueError("not as many keys as rows")
    for i in range(count):
        if result.ends[i] > result.ends[i + 1]:
            raise ValueError("the ends of keys must rise")
    if result.ends[count] > result.data.shape[0]:
        raise ValueError("a key ends behind the bytes")
    return result


cdef inline uint64_t mixed(uint64_t value) noexcept nogil:
    value = (value ^ (value >> 30)) * <uint64_t> 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * <uint64_t> 0x94D049BB133111EB
    return value ^ (value >> 31)


@cython.final
cdef class Fold:
    __doc__ = """Follows the rows of a table with a key through its changes.

    Parameters
    ----------
    width : int
        The number of columns.
    integers : bool
        Whether keys are integers; otherwise they are bytes.

    Attributes
    ----------
    truncated : bool
        Whether the changes have truncated the table.
    fault : int
        `FITS`; or `OCCUPIED` or `VACANT`, for the change that :meth:`add` returned.
    """

    cdef readonly bint truncated
    cdef readonly int fault
    cdef Py_ssize_t width
    cdef bint integers
    cdef uint64_t seed
    cdef Growing places, tenants, bytes, vectors
    # The first free tenant. The `home` of a free tenant is the next free tenant; UNKNOWN: none.
    cdef int64_t spare
    # The hash table: numbers of places, or UNKNOWN. Its size is a power of two.
    cdef int32_t *table
    cdef uint64_t table_mask

    def __cinit__(self, Py_ssize_t width, bint integers):
        self.width, self.integers = width, integers
        # A random seed, so that nobody can choose keys that collide.
        self.seed = int.from_bytes(os.urandom(8), "little")
        self.places.item, self.tenants.item = sizeof(Place), sizeof(Tenant)
        self.bytes.item, self.vectors.item = 1, sizeof(int32_t)
        self.spare = UNKNOWN
        if self.enlarge_table(1024) < 0:
            raise MemoryError

    def __dealloc__(self):
        free(self.places.at)
        free(self.tenants.at)
        free(self.bytes.at)
        free(self.vectors.at)
        free(self.table)

    def add(
        self, int64_t first, const uint8_t[::1] steps, object keys,
        const int64_t[::1] moved_rows, object moved_keys,
        const int64_t[::1] unsent_rows, const int64_t[::1] unsent_columns,
    ):
        """Add changes in stream order.

        Parameters
        ----------
        first : int
            The number of the first change; the others count on from there.
        steps : numpy.ndarray of uint8, of shape (n,)
            `INSERT`, `UPDATE` or `DELETE` for each change.
        keys : Keys of n rows
            The key of the row after each change; for a delete, the key of the deleted row.
        moved_rows : numpy.ndarray of int64, of shape (m,)
            The updates that have the row's old key, as ascending indexes of changes.
        moved_keys : Keys of m rows
            The old keys of these updates. They may equal the new keys.
        unsent_rows, unsent_columns : numpy.ndarray of int64, of shape (k,)
            Pairs of an update, as index, and a column that it did not send; sorted and unique.

        Returns
        -------
        int
            -1, or the index of the first change that does not fit the earlier ones. After such a
            change, the fold can't be used any more.
        """
        cdef _Keys now = keys_of(keys, self.integers, steps.shape[0])
        cdef _Keys before = keys_of(moved_keys, self.integers, moved_rows.shape[0])
        cdef Py_ssize_t i, count = steps.shape[0]
        cdef Py_ssize_t move = 0, moves = moved_rows.shape[0]
        cdef Py_ssize_t pair = 0, pairs = unsent_rows.shape[0], end
        cdef int fault = FITS
        cdef uint64_t[TOGETHER] hashes
        if unsent_columns.shape[0] != pairs:
            raise ValueError("not as many columns as rows that lack them")
        for i in range(pairs):
            if not 0 <= unsent_columns[i] < self.width:
                raise IndexError("no such column")
        with nogil:
            for i in range(count):
                if i % TOGETHER == 0:
                    self.prefetch_keys(now, i, min(i + TOGETHER, count), hashes)
                while pair < pairs and unsent_rows[pair] < i:
                    pair += 1
                end = pair
                while end < pairs and unsent_rows[end] == i:
                    end += 1
                if move < moves and moved_rows[move] == i:
                    fault = self.step(
                        first + i, steps[i], now.take(i), hashes[i % TOGETHER],
                        before.take(move), True,
                        &unsent_columns[pair] if end > pair else NULL, end - pair,
                    )
                    move += 1
                else:
                    fault = self.step(
                        first + i, steps[i], now.take(i), hashes[i % TOGETHER],
                        now.take(i), False,
                        &unsent_columns[pair] if end > pair else NULL, end - pair,
                    )
                if fault != FITS:
                    break
            else:
                i = -1
        if fault == NO_MEMORY:
            raise MemoryError
        self.fault = fault
        return i

    def truncate(self):
        """Drop all rows: the table is empty, and what it had before does not matter."""
        self.truncated = True
        self.places.count = self.tenants.count = self.bytes.count = self.vectors.count = 0
        self.spare = UNKNOWN
        memset(self.table, 0xFF, (self.table_mask + 1) * sizeof(int32_t))

    # Hash the keys from `first` to `end`, and prefetch the first slot of the hash table, its place
    # and the place's tenant.
    cdef void prefetch_keys(
        self, _Keys keys, Py_ssize_t first, Py_ssize_t end, uint64_t *hashes
    ) noexcept nogil:
        cdef Py_ssize_t i
        cdef int64_t place
        for i in range(first, end):
            hashes[i - first] = self.hashed(keys.take(i))
            prefetch(&self.table[hashes[i - first] & self.table_mask])
        for i in range(first, end):
            place = self.table[hashes[i - first] & self.table_mask]
            if place != UNKNOWN:
                prefetch(<Place *> self.places.at + place)
        for i in range(first, end):
            place = self.table[hashes[i - first] & self.table_mask]
            if place != UNKNOWN:
                place = (<Place *> self.places.at)[place].tenant
                if place != UNKNOWN:
                    prefetch(<Tenant *> self.tenants.at + place)

    cdef int step(
        self, int64_t number, uint8_t step, Key key, uint64_t hash, Key old, bint moved,
        const int64_t *unsent, Py_ssize_t count,
    ) noexcept nogil:
        cdef int64_t tenant, place, before
        cdef int fault = FITS
        cdef uint64_t old_hash = 0
        if moved:
            old_hash = self.hashed(old)
            moved = old_hash != hash or not self.same(key, old)
        if step == UPDATE and not moved:
            place = self.there(key, hash, &fault)
            if place < 0:
                return fault
            tenant = (<Place *> self.places.at)[place].tenant
            (<Place *> self.places.at)[place].last = number
            return self.sent(tenant, number, unsent, count)
        if step == INSERT:
            tenant = self.new_tenant(UNKNOWN)
            if tenant < 0:
                return NO_MEMORY
        else:
            if step == DELETE:
                before = self.there(key, hash, &fault)
            else:
                before = self.there(old, old_hash, &fault)
            if before < 0:
                return fault
            tenant = self.leave(before, number)
            if step == DELETE:
                (<Tenant *> self.tenants.at)[tenant].home = self.spare
                (<Tenant *> self.tenants.at)[tenant].mixed = False
                self.spare = tenant
                return FITS
        place = self.find(key, hash)
        if place < 0:
            place = self.new_place(key, hash, False)
            if place < 0:
                return NO_MEMORY
        if (<Place *> self.places.at)[place].tenant != UNKNOWN:
            return OCCUPIED
        (<Place *> self.places.at)[place].tenant = tenant
        (<Place *> self.places.at)[place].last = number
        return self.sent(tenant, number, unsent, count)

    # Return the place of a key that has a row. Without a row, return -1 and set `fault`.
    cdef inline int64_t there(self, Key key, uint64_t hash, int *fault) noexcept nogil:
        cdef int64_t tenant, place = self.find(key, hash)
        if place < 0 and not self.truncated:
            place = self.new_place(key, hash, True)
            tenant = self.new_tenant(place) if place >= 0 else -1
            if tenant < 0:
                fault[0] = NO_MEMORY
                return -1
            (<Place *> self.places.at)[place].tenant = tenant
        if place < 0 or (<Place *> self.places.at)[place].tenant == UNKNOWN:
            fault[0] = VACANT
            return -1
        return place

    cdef inline int64_t leave(self, int64_t at, int64_t number) noexcept nogil:
        cdef Place *place = <Place *> self.places.at + at
        cdef int64_t found = place.tenant
        cdef Tenant *tenant = <Tenant *> self.tenants.at + found
        place.tenant, place.last = UNKNOWN, number
        if tenant.home == at and tenant.origin == UNKNOWN:
            tenant.origin = number
        return found

    cdef int sent(
        self, int64_t which, int64_t number, const int64_t *unsent, Py_ssize_t count
    ) noexcept nogil:
        cdef Tenant *tenant = <Tenant *> self.tenants.at + which
        cdef int32_t *sources
        cdef Py_ssize_t column, i
        if count == 0:
            tenant.mixed, tenant.row = False, number
            return FITS
        if tenant.vector == UNKNOWN:
            if room(&self.vectors, self.width) < 0:
                return NO_MEMORY
            tenant.vector = self.vectors.count // self.width
            self.vectors.count += self.width
        sources = self.sources_of(tenant)
        if not tenant.mixed:
            for column in range(self.width):
                sources[column] = tenant.row
        i = 0
        for column in range(self.width):
            if i < count and unsent[i] == column:
                i += 1
            else:
                sources[column] = number
        tenant.mixed, tenant.row = True, number
        return FITS

    cdef inline int32_t *sources_of(self, Tenant *tenant) noexcept nogil:
        return <int32_t *> self.vectors.at + <Py_ssize_t> tenant.vector * self.width

    cdef inline uint64_t hashed(self, Key key) noexcept nogil:
        if self.integers:
            return mixed(<uint64_t> key.number ^ self.seed)
        return hash_of(key.at, key.size, self.seed)

    cdef inline bint same(self, Key one, Key other) noexcept nogil:
        if self.integers:
            return one.number == other.number
        return one.size == other.size and (
            one.size == 0 or memcmp(one.at, other.at, one.size) == 0
        )

    cdef inline int64_t find(self, Key key, uint64_t hash) noexcept nogil:
        cdef uint64_t at = hash & self.table_mask
        cdef int64_t found = self.table[at]
        cdef Place *place
        while found != UNKNOWN:
            place = <Place *> self.places.at + found
            if place.hash == <uint32_t> hash:
                if self.integers:
                    if place.key == key.number:
                        return found
                elif self.has_bytes(place, key):
                    return found
            at = (at + 1) & self.table_mask
            found = self.table[at]
        return -1

    cdef inline bint has_bytes(self, Place *place, Key key) noexcept nogil:
        cdef const uint8_t *at = <uint8_t *> self.bytes.at + place.key
        cdef int64_t size
        memcpy(&size, at, sizeof(size))
        return size == key.size and (size == 0 or memcmp(at + sizeof(size), key.at, size) == 0)

    # Return -1 without memory.
    cdef int64_t new_place(self, Key key, uint64_t hash, bint is_in_table) noexcept nogil:
        cdef Place *place
        cdef int64_t number = self.places.count
        if <uint64_t> number * 2 > self.table_mask and (
            self.enlarge_table((self.table_mask + 1) * 2) < 0
        ):
            return -1
        if number == INT32_MAX or room(&self.places, 1) < 0 or (
            not self.integers and room(&self.bytes, sizeof(key.size) + key.size) < 0
        ):
            return -1
        place = <Place *> self.places.at + number
        place.hash, place.is_in_table = hash, is_in_table
        place.tenant, place.last = UNKNOWN, UNKNOWN
        place.key = key.number
        if not self.integers:
            place.key = self.bytes.count
            memcpy(<uint8_t *> self.bytes.at + self.bytes.count, &key.size, sizeof(key.size))
            self.bytes.count += sizeof(key.size)
            if key.size:
                memcpy(<uint8_t *> self.bytes.at + self.bytes.count, key.at, key.size)
            self.bytes.count += key.size
        self.places.count += 1
        self.enter(number, hash)
        return number

    cdef inline void enter(self, int64_t number, uint64_t hash) noexcept nogil:
        cdef uint64_t at = hash & self.table_mask
        while self.table[at] != UNKNOWN:
            at = (at + 1) & self.table_mask
        self.table[at] = number

    cdef int enlarge_table(self, uint64_t size) noexcept nogil:
        cdef int32_t *table = <int32_t *> calloc(size, sizeof(int32_t))
        cdef Py_ssize_t i
        if table == NULL:
            return -1
        free(self.table)
        self.table, self.table_mask = table, size - 1
        memset(table, 0xFF, size * sizeof(int32_t))
        for i in range(<Py_ssize_t> self.places.count):
            self.enter(i, (<Place *> self.places.at)[i].hash)
        return 0

    # Return -1 without memory.
    cdef int64_t new_tenant(self, int64_t home) noexcept nogil:
        cdef int64_t number = self.spare
        cdef Tenant *tenant
        if number != UNKNOWN:
            tenant = <Tenant *> self.tenants.at + number
            self.spare = tenant.home
        else:
            if room(&self.tenants, 1) < 0:
                return -1
            number = self.tenants.count
            self.tenants.count += 1
            tenant = <Tenant *> self.tenants.at + number
            tenant.vector = UNKNOWN
        tenant.home, tenant.row, tenant.origin, tenant.mixed = home, UNKNOWN, UNKNOWN, False
        return number

    def widen(self, Py_ssize_t width):
        """Add columns, which no change has sent so far."""
        cdef Growing wider
        cdef Place *place
        cdef Tenant *tenant
        cdef int32_t *sources
        cdef Py_ssize_t i, column
        memset(&wider, 0, sizeof(Growing))
        wider.item = sizeof(int32_t)
        # Drop the sources that reused tenants keep.
        for i in range(<Py_ssize_t> self.tenants.count):
            tenant = <Tenant *> self.tenants.at + i
            if not tenant.mixed:
                tenant.vector = UNKNOWN
        for i in range(<Py_ssize_t> self.places.count):
            place = <Place *> self.places.at + i
            if place.tenant == UNKNOWN:
                continue
            tenant = <Tenant *> self.tenants.at + place.tenant
            if not tenant.mixed:
                continue
            if room(&wider, width) < 0:
                free(wider.at)
                raise MemoryError
            sources = <int32_t *> wider.at + wider.count
            for column in range(width):
                sources[column] = UNKNOWN
            memcpy(sources, self.sources_of(tenant), self.width * sizeof(int32_t))
            tenant.vector = wider.count // width
            wider.count += width
        free(self.vectors.at)
        self.vectors, self.width = wider, width

    def followed(self):
        """Return the result for each key, in the order in which changes first touched the keys.

        Keys that the table had neither before nor after the changes are left out.
        """
        cdef Place *place
        cdef Tenant *tenant
        cdef Py_ssize_t i, count = 0, mixed_count = 0
        for i in range(<Py_ssize_t> self.places.count):
            place = <Place *> self.places.at + i
            if place.tenant != UNKNOWN:
                count += 1
                mixed_count += (<Tenant *> self.tenants.at)[place.tenant].mixed
            else:
                count += place.is_in_table
        flags = np.empty((2, count), np.uint8)
        arrays = np.empty((3, count), np.int32)
        source_array = np.empty((mixed_count, self.width), np.int32)
        cdef uint8_t[:, ::1] flags_at = flags
        cdef int32_t[:, ::1] at = arrays
        cdef int32_t[:, ::1] sources_at = source_array
        cdef Py_ssize_t n = 0, vector = 0
        for i in range(<Py_ssize_t> self.places.count):
            place = <Place *> self.places.at + i
            if place.tenant == UNKNOWN and not place.is_in_table:
                continue
            flags_at[0, n], flags_at[1, n] = place.is_in_table, place.tenant != UNKNOWN
            at[0, n], at[1, n], at[2, n] = place.last, UNKNOWN, UNKNOWN
            if place.tenant != UNKNOWN:
                tenant = <Tenant *> self.tenants.at + place.tenant
                if tenant.mixed:
                    at[1, n] = vector
                    memcpy(&sources_at[vector, 0], self.sources_of(tenant),
                           self.width * sizeof(int32_t))
                    vector += 1
                if tenant.home != i:
                    at[2, n] = tenant.origin
            n += 1
        return Followed(
            flags[0].view(bool), flags[1].view(bool), arrays[0], arrays[1], arrays[2], source_array
        )


# Random seeds, so that nobody can choose rows that collide.
_SEEDS = np.frombuffer(os.urandom(16), np.uint64)


def digests(const uint8_t[::1] data, const int64_t[::1] ends):
    """Return a hash of 128 bits for each row. Rows with the same bytes have the same hash.

    The probability that any two of a billion different rows have the same hash is below 1 in 10^20.
    The seed is random for each process.

    Parameters
    ----------
    data, ends : numpy.ndarray
        The rows' bytes, in the form of `Keys`.

    Returns
    -------
    numpy.ndarray of uint64, of shape (n, 2)
    """
    cdef Py_ssize_t count = ends.shape[0] - 1, i
    result = np.empty((count, 2), np.uint64)
    cdef uint64_t[:, ::1] at = result
    cdef const uint64_t[::1] seeds = _SEEDS
    cdef const uint8_t *from_ = &data[0] if data.shape[0] else NULL
    for i in range(count):
        if not 0 <= ends[i] <= ends[i + 1] <= data.shape[0]:
            raise ValueError("a row ends behind the bytes")
    with nogil:
        for i in range(count):
            at[i, 0] = hash_of(from_ + ends[i], ends[i + 1] - ends[i], seeds[0])
            at[i, 1] = hash_of(from_ + ends[i], ends[i + 1] - ends[i], seeds[1])
    return result


cdef inline uint64_t hash_of(const uint8_t *at, int64_t size, uint64_t seed) noexcept nogil:
    # Mix the size alone: a row may begin with a length, and the xor would cancel the size.
    cdef uint64_t word, hash = mixed(seed ^ <uint64_t> size)
    while size >= 8:
        memcpy(&word, at, 8)
        hash = mixed(hash ^ word)
        at += 8
        size -= 8
    if size > 0:
        word = 0
        memcpy(&word, at, size)
        hash = mixed(hash ^ word)
    return mixed(hash)
