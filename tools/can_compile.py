"""Exit with 0 if there is a C compiler that finds Python.h, to build the extension, else with 1."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig


def main() -> int:
    """Have the compiler check a file that includes Python.h."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    command = [*compiler, "-fsyntax-only", "-I", sysconfig.get_path("include"), "-x", "c", "-"]
    try:
        run = subprocess.run(
            command, input=b"#include <Python.h>\n", capture_output=True, check=False
        )
    except OSError:
        return 1
    return int(run.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
