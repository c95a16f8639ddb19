"""The report of a sync as a browser lays it out."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pgoutput_fast.apply.syncing import SyncProgress
from pgoutput_fast.apply.targets import TableState
from pgoutput_fast.cli._sync_report import ReportedEvent, SyncReport, Written, make_report
from pgoutput_fast.watching.sync_figures import SyncFigures

CHROMIUM = shutil.which("chromium")
NAMES = ("accounts", "customer_account_balance_history_of_the_previous_year", "t" * 63)
LSN = 0xFFFFFFFF_FFFFFFF0
MEASURE = """<script>document.body.dataset.over = [
  ...document.querySelectorAll('.scroll, .figures div, section, body, td')
].filter(one => one.scrollWidth > one.clientWidth).map(one => one.className || one.tagName).join();
</script></body>"""


def page() -> str:
    """A report with long names, and with an LSN that is as long as one can be."""
    commit_time = 1_764_000_000_000_000
    held = tuple(
        TableState(i, "public", name, f"public.{name}", i, LSN, LSN, commit_time)
        for i, name in enumerate(NAMES, 1)
    )
    changes = {f"public.{name}": 123_456_789 for name in NAMES}
    progress = SyncProgress(
        LSN,
        commit_time,
        370_370_367,
        1_234_567,
        0.5,
        changes,
        {},
        table_states=held,
        names={one.relation_id: one.stored_name for one in held},
        left=(f"public.{NAMES[1]}",),
    )
    return make_report(
        SyncReport(
            "database shop of db.example", "duckdb:/srv/warehouse/shop.duckdb", 1_764_000_000.0,
            1_764_000_100.0, SyncFigures(progress, 123_456_789, 1234.5, None),
            [ReportedEvent(1_764_000_000.0, f"public.{NAMES[2]}", "copied again")],
            [Written(1_764_000_000.0, 5, 0.1)], is_over=True,
        )
    )  # fmt: skip


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
@pytest.mark.parametrize("width", [1200, 1600])
def test_nothing_of_a_report_is_cut_off(tmp_path: Path, width: int) -> None:
    file = tmp_path / "report.html"
    file.write_text(page().replace("</body>", MEASURE))
    ran = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900",
         f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert re.findall(r'data-over="(.*?)"', ran.stdout) == [""]
