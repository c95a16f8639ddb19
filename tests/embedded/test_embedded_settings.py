"""Arguments of the embedded server that are refused before a server is started."""

from __future__ import annotations

import pytest

from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.errors import PgOutputError


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"work_mem": "1MB'\nfsync = on"}, "must be one line"),
        ({"work_mem = '1MB'\nfsync": "on"}, "is no name of a server setting"),
        ({"Port": 1}, "is the embedded server's own"),
    ],
)
def test_settings_that_lead_astray_are_refused(settings: dict[str, object], match: str) -> None:
    with pytest.raises(PgOutputError, match=match):
        EmbeddedServer(18, settings)


def test_a_version_that_is_no_number_is_refused() -> None:
    with pytest.raises(TypeError, match="version must be an int such as 18, not str"):
        EmbeddedServer("18")  # type: ignore[arg-type]
