"""Build of the compiled core; all metadata is in pyproject.toml.

Five environment variables, each 1, or 0 or unset:

PGOUTPUT_FAST_NO_EXT       build without extensions: a pure Python wheel
PGOUTPUT_FAST_REQUIRE_EXT  a failed build of an extension is an error (else the Python twin serves)
PGOUTPUT_FAST_DEBUG        no optimisation, debug symbols, C assertions, Cython's own bound checks
PGOUTPUT_FAST_LINE_TRACE   line tracing for coverage and profilers; slow
PGOUTPUT_FAST_SANITIZE     AddressSanitizer and UndefinedBehaviorSanitizer; see `make sanitize`
"""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import Extension, setup

PACKAGE = Path("pgoutput_fast")
SOURCES = sorted(PACKAGE.rglob("*.pyx"))

SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1"]


def switch(name: str) -> bool:
    """Read one switch. Anything but 0 and 1 is refused: a typo must not change what is released."""
    value = os.environ.get(f"PGOUTPUT_FAST_{name}", "")
    if value not in {"", "0", "1"}:
        raise SystemExit(f"PGOUTPUT_FAST_{name} must be 0 or 1, not {value!r}")
    return value == "1"


def extensions() -> list[Extension]:
    """The extensions as generated C, or none when switched off."""
    required, debug, line_trace = switch("REQUIRE_EXT"), switch("DEBUG"), switch("LINE_TRACE")
    sanitize = SANITIZE if switch("SANITIZE") else []
    if switch("NO_EXT"):
        if required:
            raise SystemExit("PGOUTPUT_FAST_NO_EXT and PGOUTPUT_FAST_REQUIRE_EXT: set only one")
        return []

    # A pure build does not need it.
    from Cython.Build import cythonize

    modules = cythonize(
        [
            Extension(
                ".".join(source.with_suffix("").parts),
                [str(source)],
                # setup.py holds compiler flags and directives: a change of it rebuilds.
                depends=["setup.py", *map(str, sorted(PACKAGE.rglob("*.h")))],
                include_dirs=[str(PACKAGE), str(PACKAGE / "columnar")],
                extra_compile_args=(["-O0", "-g", "-UNDEBUG"] if debug else ["-O3", "-g0"])
                + sanitize,
                extra_link_args=sanitize,
                define_macros=[("CYTHON_TRACE_NOGIL", "1")] if line_trace else [],
            )
            for source in SOURCES
        ],
        # The generated C stays out of the source tree, in one directory for each set of directives,
        # as Cython compares nothing but the times of files.
        build_dir="build/cython" + "-debug" * debug + "-trace" * line_trace,
        compiler_directives={
            "language_level": 3,
            # The code checks every bound itself, against the frame, which Cython does not know.
            "boundscheck": debug,
            "wraparound": False,
            # Signatures for inspect, by which the tests hold the twins against each other.
            # (embedsignature would put them into the docstrings, where the twins would differ.)
            "binding": True,
            "linetrace": line_trace,
        },
    )
    for module in modules:
        # cythonize() loses this attribute, so it can't be an argument above.
        module.optional = not required
    return list(modules)


setup(ext_modules=extensions())
