"""Build manylinux wheels of this machine's architecture, one for each Python that is found.

The C compiler is that of zig, from the package ziglang, because it links against an old glibc on
any machine. auditwheel says by the symbols which glibc a wheel needs, and sets the tag. Each wheel
is then installed into an empty environment, and tested there.

Release wheels come from cibuildwheel, whose compiler is gcc: gcc's build takes some 8 % fewer
instructions. In zig's build, __builtin_cpu_supports() finds no AVX2, and columns of long texts take
twice as many.

    python tools/make_wheels.py [DIRECTORY]

The directory is `dist` by default. It needs the dependency groups "build" and "wheels", and a
package index.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from test_wheel import ROOT, run, settings, test_installed

GLIBC = "2.17"
MOST_BYTES = 3_000_000
SOURCES = (".c", ".h", ".pyx", ".pxd")


def pythons() -> list[str]:
    """One Python for each minor version that the project supports."""
    command = [ROOT / "tools" / "find-python", "--all"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()


def version_of(python: str) -> str:
    """The version of a Python as in the tags of wheels: "313"."""
    command = [python, "-c", "import sys; print('%d%d' % sys.version_info[:2])"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def build(python: str, sdist: Path, directory: Path) -> Path:
    """Build a wheel of the sdist with zig, and give it the tag of the glibc that it needs."""
    machine = platform.machine()
    compiler = f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.{GLIBC}"
    # Where Debian's Python.h looks for its pyconfig.h; zig's own headers come first.
    compiler += " -idirafter /usr/include"
    raw, repaired = directory / "raw", directory / "repaired"
    # The pip of this environment: the Python of a distribution may have none.
    run(
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python),
        *("wheel", "--no-deps", "--wheel-dir", raw, sdist),
        **{**settings()["environment"], "CC": compiler, "LDSHARED": f"{compiler} -shared"},
    )
    (wheel,) = raw.glob("*.whl")
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    # It refuses a wheel that needs a newer glibc than the tag says, and looks for patchelf on PATH.
    run(
        *(sys.executable, "-m", "auditwheel", "repair", "--plat", tag, "-w", repaired, wheel),
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    )
    (wheel,) = repaired.glob("*.whl")
    return wheel


def faults(wheel: Path, python: str) -> list[str]:
    """What is wrong with a wheel's name, size or content."""
    version = version_of(python)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    compiled = {name.partition(".")[0] for name in names if name.endswith(".so")}
    expected = {
        str(path.relative_to(ROOT).with_suffix("")) for path in ROOT.glob("pgoutput_fast/**/*.pyx")
    }
    tops = {name.partition("/")[0].partition("-")[0] for name in names}
    checks = {
        "its tag is that of another Python": f"-cp{version}-cp{version}-" in wheel.name,
        "its tag is not that of the old glibc": f"manylinux_{GLIBC.replace('.', '_')}_"
        in wheel.name,
        f"it has more than {MOST_BYTES:,} bytes": wheel.stat().st_size <= MOST_BYTES,
        "it has sources of C or Cython": not [name for name in names if name.endswith(SOURCES)],
        "it has other packages": tops == {"pgoutput_fast", "pyspark_pgoutput"},
        "a compiled module is missing": compiled == expected,
        "it lacks py.typed": "pgoutput_fast/py.typed" in names,
        "it lacks the licence": any(name.endswith("/licenses/LICENSE") for name in names),
    }
    return [fault for fault, is_right in checks.items() if not is_right]


def main(target: Path) -> int:
    """Build, check and test the wheels, and put them into a directory; return the exit code."""
    target.mkdir(parents=True, exist_ok=True)
    failed = False
    with tempfile.TemporaryDirectory(prefix="pgoutput-fast-wheels-") as temporary:
        directory = Path(temporary)
        run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", directory, ROOT)
        (sdist,) = directory.glob("*.tar.gz")
        for python in pythons():
            place = directory / version_of(python)
            place.mkdir()
            wheel = build(python, sdist, place)
            found = faults(wheel, python)
            print(f"{wheel.name}: {wheel.stat().st_size:,} bytes", *found, sep="\n  ", flush=True)
            if found or test_installed(wheel, python, place):
                failed = True
                continue
            (target / wheel.name).write_bytes(wheel.read_bytes())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(*sys.argv[1:2] or ["dist"])))
