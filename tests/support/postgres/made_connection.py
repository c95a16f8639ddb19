"""A connection that is made up, for streams without a server."""

from __future__ import annotations

import socket

import psycopg
from psycopg.pq import DiagnosticField


class Notice:
    """What a server says beside the data; by default that it leaves changes out."""

    def __init__(self, function=b"LoadPublications"):
        self.fields = {
            DiagnosticField.SQLSTATE: b"55000",
            DiagnosticField.MESSAGE_PRIMARY: b'skipped loading publication "p"',
            DiagnosticField.SOURCE_FUNCTION: function,
        }

    def error_field(self, field):
        return self.fields.get(field)


class Connection:
    """What the stream needs of a connection; a piece comes with each wait, then nothing.

    Who reads again at once, without a wait, finds nothing, unless `flows`. As libpq does, it hands
    over notices when it comes upon them, be it before the next message or when something is sent.
    """

    ssl_in_use = False
    wal_sender_timeout = 0
    left_out = None

    def __init__(self, pieces, error=None, *, flows=False):
        self.flows = flows
        self.has_given = False
        self.ends = socket.socketpair()
        self.socket = self.ends[0].fileno()
        self.pgconn = self
        self.pieces = list(pieces)
        self.messages = []
        self.error = error
        self.sent = []

    def hand_over_notices(self):
        while self.messages and isinstance(self.messages[0], Notice):
            self.notice_handler(self.messages.pop(0))

    def follow_timeline(self):
        """It is no standby."""

    def get_copy_data(self, no_wait):
        self.hand_over_notices()
        if not self.messages:
            return 0, memoryview(b"")
        data = self.messages.pop(0)
        if isinstance(data, BaseException):
            raise data
        return len(data), memoryview(data)

    def notifies(self):
        return None

    def consume_input(self):
        if self.has_given and not self.flows:
            self.has_given = False
        elif self.pieces:
            self.messages += self.pieces.pop(0)
            self.has_given = True
        elif self.error:
            raise self.error

    def put_copy_data(self, data):
        self.hand_over_notices()
        self.sent.append(bytes(data))

    def put_copy_end(self):
        raise psycopg.OperationalError("the end")

    def is_busy(self):
        return False

    def flush(self):
        return 0

    def close(self):
        for end in self.ends:
            end.close()
