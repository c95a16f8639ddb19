"""Run the benchmarks by ``python -m benchmarks``; suite.py has the code."""

from __future__ import annotations

import sys

from benchmarks.suite import main

sys.exit(main())
