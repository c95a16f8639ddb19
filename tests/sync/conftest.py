"""The fixtures that give a database and a target that follows it."""

from __future__ import annotations

from support.targets.synced_database import quick_upkeep as quick_upkeep
from support.targets.synced_database import synced as synced
from support.targets.synced_database import tables as tables
