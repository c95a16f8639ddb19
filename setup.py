"""Build the compiled modules; all metadata is in pyproject.toml.

Five environment variables are switches, each 1, or 0 or unset:

PGOUTPUT_FAST_NO_EXT       build without extensions: a pure Python wheel
PGOUTPUT_FAST_REQUIRE_EXT  a failed build is an error (by default the Python twin is used then)
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

# Cython's code adds 0 to NULL, which clang's pointer-overflow would refuse.
SANITIZE = [
    *("-fsanitize=address,undefined", "-fno-sanitize=pointer-overflow"),
    *("-fno-sanitize-recover=undefined", "-g", "-O1"),
]


def switch(name: str) -> bool:
    """Read one switch. Other values than 0 and 1 are errors, as a typo could change a release."""
    value = os.environ.get(f"PGOUTPUT_FAST_{name}", "")
    if value not in {"", "0", "1"}:
        raise SystemExit(f"PGOUTPUT_FAST_{name} must be 0 or 1, not {value!r}")
    return value == "1"


def extensions() -> list[Extension]:
    """The extensions with their generated C; an empty list if they are switched off."""
    required, debug, line_trace = switch("REQUIRE_EXT"), switch("DEBUG"), switch("LINE_TRACE")
    sanitize = SANITIZE if switch("SANITIZE") else []
    if switch("NO_EXT"):
        if required:
            raise SystemExit("PGOUTPUT_FAST_NO_EXT and PGOUTPUT_FAST_REQUIRE_EXT: set only one")
        return []

    # Imported here, as a build without extensions does not need Cython.
    from Cython.Build import cythonize

    modules = cythonize(
        [
            Extension(
                ".".join(source.with_suffix("").parts),
                [str(source)],
                # A change of the compiler flags and directives in setup.py rebuilds the modules.
                depends=["setup.py", *map(str, sorted(PACKAGE.rglob("*.h")))],
                include_dirs=[
                    str(PACKAGE / part) for part in ("", "protocol", "values", "columnar")
                ],
                extra_compile_args=(["-O0", "-g", "-UNDEBUG"] if debug else ["-O3", "-g0"])
                + sanitize,
                extra_link_args=sanitize,
                define_macros=[("CYTHON_TRACE_NOGIL", "1")] if line_trace else [],
            )
            for source in SOURCES
        ],
        # The generated C goes into a directory outside the source tree, and into another one for
        # each set of directives, as Cython compares only the times of files.
        build_dir="build/cython" + "-debug" * debug + "-trace" * line_trace,
        compiler_directives={
            "language_level": 3,
            # The code checks all reads against the length of the frame, which Cython can't do.
            "boundscheck": debug,
            "wraparound": False,
            # Gives functions signatures for inspect, by which tests compare the twins.
            # (embedsignature would put them into the docstrings, which would then differ.)
            "binding": True,
            "linetrace": line_trace,
            # Importing the modules leaves the GIL of a free-threaded Python off.
            "freethreading_compatible": True,
        },
    )
    for module in modules:
        # Set here, as cythonize() ignores it as an argument of Extension.
        module.optional = not required
    return list(modules)


setup(ext_modules=extensions())
