"""`python -m benchmarks`: see suite.py."""

from __future__ import annotations

import sys

from benchmarks.suite import main

sys.exit(main())
