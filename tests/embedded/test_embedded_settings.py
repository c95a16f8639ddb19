"""Arguments of the embedded server that are refused before a server is started."""

from __future__ import annotations

import pytest
from support.expected_errors import expect_error

from pgoutput_fast.embedded import EmbeddedServer


@pytest.mark.parametrize(
    "settings",
    [
        {"work_mem": "1MB'\nfsync = on"},
        {"work_mem = '1MB'\nfsync": "on"},
        {"Port": 1},
    ],
)
def test_settings_that_lead_astray_are_refused(settings: dict[str, object]) -> None:
    with expect_error(code="bad_option"):
        EmbeddedServer(18, settings)


def test_a_version_that_is_no_number_is_refused() -> None:
    with pytest.raises(TypeError, match="version"):
        EmbeddedServer("18")  # type: ignore[arg-type]
