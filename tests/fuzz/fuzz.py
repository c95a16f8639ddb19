"""Run all fuzz targets in turn, and say how many inputs each has run and what it has found.

    python tests/fuzz/fuzz.py [--minutes N] [--only TARGET]…

The targets in Python always run, under atheris. If clang with its libFuzzer is there, the targets
in C run too, and the compiled modules are built with coverage, AddressSanitizer and UBSan. Without
it, libFuzzer only sees the coverage of Python code, and this says so. Everything is in build/fuzz:
the inputs in corpus/, which later runs go on from, what was found in found/, and the logs.

A file in found/ repeats its fault as `python tests/fuzz/python_targets.py TARGET FILE`, or, for the
targets in C, as `build/fuzz/core-TARGET FILE`. Add a test or a vector for each fault.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = ROOT / "tests" / "fuzz"
FUZZ = ROOT / "build" / "fuzz"
CORE = ("core-tuples", "core-values", "core-nested", "core-rows")
"""The targets of core_targets.c."""
PYTHON = (
    "alone", "frames", "values", "fields", "columns", "batches", "copies", "transactions",
    "segments", "layouts", "options", "connections",
)  # fmt: skip
"""The targets of python_targets.py."""
TARGETS = [sys.executable, str(HERE / "python_targets.py")]
LONGEST = {"core-values": 64, "values": 200, "fields": 200, "segments": 16384}
"""The longest input in bytes of some targets; of others, it is 1000."""
SANITIZERS = {
    "ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=8:malloc_context_size=5",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "PYTHONMALLOC": "malloc",
}
# Those of setup.py, but -O2.
CLANG = ["clang", "-g", "-O2", "-fsanitize=fuzzer,address,undefined",
         "-fno-sanitize-recover=undefined"]  # fmt: skip


def has_clang() -> bool:
    """Return whether clang builds and links a libFuzzer target."""
    source = b"int LLVMFuzzerTestOneInput(void) { return 0; }"
    command = [*CLANG, "-xc", "-", "-o", str(FUZZ / "empty")]
    try:
        return subprocess.run(command, input=source, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def powers() -> Iterator[str]:
    """Yield powers.h: the table that fill_powers() of _values.pyx makes."""
    yield "static const pgf_power POWERS[] = {"
    for power in range(-342, 309):
        number = 10**power << 128 if power >= 0 else 0
        if power < 0:
            divisor = 10**-power
            number = (1 << (divisor.bit_length() + 128)) // divisor
        number >>= number.bit_length() - 128
        yield f"    {{{number >> 64}ull, {number & (1 << 64) - 1}ull}},"
    yield "};"


def build(core: list[str]) -> None:
    """Build the targets in C, and the compiled modules with coverage and sanitizers."""
    (FUZZ / "powers.h").write_text("\n".join(powers()))
    parts = ("", "protocol", "values", "columnar")
    include = [f"-I{FUZZ}", *(f"-I{ROOT / 'pgoutput_fast' / part}" for part in parts)]
    for name in core:
        target = f"-DTARGET={name.removeprefix('core-')}"
        command = [*CLANG, *include, target, str(HERE / "core_targets.c"), "-o", str(FUZZ / name)]
        subprocess.run(command, check=True)
    print(
        "Building the compiled modules with sanitizers (the first time takes minutes)", flush=True
    )
    switches = {"PGOUTPUT_FAST_SANITIZE": "1", "PGOUTPUT_FAST_REQUIRE_EXT": "1"}
    compiler = {"CC": "clang", "LDSHARED": "clang -shared", "CFLAGS": "-fsanitize=fuzzer-no-link"}
    command = [sys.executable, "setup.py", "--quiet", "build", f"--build-base={FUZZ}",
               f"--build-lib={FUZZ / 'lib'}"]  # fmt: skip
    with (FUZZ / "build.log").open("w") as log:
        subprocess.run(command, cwd=ROOT, env={**os.environ, **switches, **compiler}, check=True,
                       stdout=log, stderr=log)  # fmt: skip


def run(name: str, seconds: int, has_clang: bool) -> bool:
    """Run a target. Print how many inputs it ran, and return whether it found nothing."""
    corpus = FUZZ / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    settings = dict(os.environ)
    if has_clang:
        settings |= SANITIZERS
    if has_clang and name not in CORE:
        import atheris

        settings["LD_PRELOAD"] = str(Path(atheris.path(), "asan_with_fuzzer.so"))
        paths = [str(FUZZ / "lib"), os.environ.get("PYTHONPATH", "")]
        settings["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    prefix = FUZZ / "found" / f"{name}-"
    log = FUZZ / f"{name}.log"
    with log.open("w") as output:
        status = subprocess.run(
            [
                *([str(FUZZ / name)] if name in CORE else [*TARGETS, name]),
                f"-max_total_time={seconds}", f"-max_len={LONGEST.get(name, 1000)}",
                "-timeout=60", "-rss_limit_mb=4096", "-reload=0",
                f"-artifact_prefix={prefix}", str(corpus), str(FUZZ / "seeds" / name),
            ],
            env=settings, stdout=output, stderr=output,
        ).returncode  # fmt: skip
    text = log.read_text(errors="replace")
    count = max(map(int, re.findall(r"^#(\d+)\t", text, re.MULTILINE)), default=0)
    print(f"{name:18} {count:12,}   {'nothing' if status == 0 else f'see {log}'}", flush=True)
    if status:
        print("\n".join(re.findall(r".*(?:SUMMARY|Error|Test unit written).*", text)[:5])[:3000])
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10, help="for all targets together")
    parser.add_argument("--only", action="append", help="a target; may be repeated")
    arguments = parser.parse_args()
    (FUZZ / "found").mkdir(parents=True, exist_ok=True)
    with_clang = has_clang()
    names = arguments.only or [*CORE, *PYTHON]
    if with_clang:
        build([name for name in names if name in CORE])
    else:
        names = [name for name in names if name not in CORE]
        print(
            "NO CLANG WITH LIBFUZZER: the C core is NOT fuzzed under sanitizers. The coverage of "
            "Python code alone guides the inputs. On Debian: apt install clang libclang-rt-dev",
            file=sys.stderr,
        )
    with (FUZZ / "seeds.log").open("w") as log:
        subprocess.run([*TARGETS, "--seeds", str(FUZZ / "seeds")], check=True, stderr=log)
    seconds = max(1, round(arguments.minutes * 60 / len(names)))
    print(f"{'target':18} {'executions':>12}   found in {seconds} s", flush=True)
    sound = [run(name, seconds, with_clang) for name in names]
    return 0 if all(sound) else 1


if __name__ == "__main__":
    sys.exit(main())
