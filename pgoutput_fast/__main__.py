"""``python -m pgoutput_fast`` is the command ``pgoutput-fast``."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
