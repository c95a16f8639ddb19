#!/bin/sh
# A cluster of Spark's own on one machine, and a sync whose windows its workers write:
#
#   examples/cluster/standalone.sh --dsn postgresql:///shop --slot shop_spark --publication shop --to lake/
#
# A master and two workers are processes of their own, as they would be on three machines. There you
# start them by systemd, and give all of them the package. The processes here end with the sync. It needs Java 17 or newer. MASTER_PORT (7077) and PYTHON (python3) may be set.
set -eu

python=${PYTHON:-python3}
port=${MASTER_PORT:-7077}
SPARK_HOME=$("$python" -c 'import pathlib, pyspark; print(pathlib.Path(pyspark.__file__).parent)')
work=$(mktemp -d)
export SPARK_HOME SPARK_LOCAL_IP=127.0.0.1 SPARK_LOG_DIR="$work" PYSPARK_PYTHON="$python"

pids=
# shellcheck disable=SC2086 # several words
trap 'kill $pids || true; wait $pids || true; rm -rf "$work"' EXIT

start() {
    "$SPARK_HOME/bin/spark-class" "$@" >>"$work/log" 2>&1 &
    pids="$pids $!"
}

start org.apache.spark.deploy.master.Master --host 127.0.0.1 --port "$port" --webui-port 0
for _ in 1 2; do
    start org.apache.spark.deploy.worker.Worker --host 127.0.0.1 --webui-port 0 \
        --cores 1 --memory 1g --work-dir "$work" "spark://127.0.0.1:$port"
done

# Without exec, so that the cluster is ended behind it; the signal of Ctrl-C comes to it by itself.
code=0
"$python" -m pgoutput_fast sync --engine spark --master "spark://127.0.0.1:$port" \
    --conf spark.executor.memory=512m "$@" || code=$?
exit "$code"
