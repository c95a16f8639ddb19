#!/bin/sh
# Builds the peers that need building into PEERS_BUILD (default: build/peers of the checkout), as far
# as their tools are here: Go, cargo and libpq's headers, a JDK 17 with Maven, and for pgoutput-decoder
# a Python of 3.12 or newer (PEERS_PYTHON). One that fails leaves the others alone: who is missing is
# listed by the benchmarks. Each can be named: build.sh [go] [rust] [java] [py] [py312]
set -u
here=$(cd "$(dirname "$0")" && pwd)
build=${PEERS_BUILD:-$here/../../build/peers}
mkdir -p "$build" && build=$(cd "$build" && pwd) || exit 1
[ $# -gt 0 ] || set -- go rust java py py312

build_go() { (cd "$here/go" && go build -o "$build/pglogrepl_peer" .); }

# Cargo writes its lock file beside the manifest, hence the copy.
build_rust() {
    rm -rf "$build/rust" && cp -r "$here/rust" "$build/rust" && cd "$build/rust" &&
        CARGO_TARGET_DIR="$build/cargo" cargo build --quiet --release &&
        cp "$build/cargo/release/pg_walstream_peer" "$build/"
}

build_java() {
    mvn -B -q -f "$here/java/pom.xml" -Doutput="$build/java" -DincludeScope=runtime \
        -DoutputDirectory="$build/java/lib" package dependency:copy-dependencies
}

# With pydantic 2 pypgoutput's reader ends at the first timestamptz, without a word.
build_py() {
    python3 -m venv "$build/py" &&
        "$build/py/bin/pip" install -q psycopg2-binary 'pydantic<2' &&
        "$build/py/bin/pip" install -q --no-deps pypgoutput==0.0.3
}

build_py312() {
    "${PEERS_PYTHON:-python3.12}" -m venv "$build/py312" &&
        "$build/py312/bin/pip" install -q pgoutput-decoder==0.1.0
}

failed=
for part in "$@"; do
    echo "== $part"
    if (build_"$part"); then :; else echo "$part failed" >&2; failed="$failed $part"; fi
done
[ -z "$failed" ] || echo "Not built:$failed" >&2
