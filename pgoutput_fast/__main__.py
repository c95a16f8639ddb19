"""Run the command ``pgoutput-fast`` as ``python -m pgoutput_fast``."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
