package peers;

import io.debezium.embedded.Connect;
import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.DebeziumEngine.RecordCommitter;
import io.debezium.engine.RecordChangeEvent;
import io.debezium.engine.format.ChangeEventFormat;
import io.debezium.engine.format.Json;
import java.io.IOException;
import java.lang.management.ManagementFactory;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Executors;
import org.apache.kafka.connect.data.Struct;
import org.apache.kafka.connect.source.SourceRecord;

/**
 * Debezium Engine, without Kafka: a peer of drain.py. DRAIN_MODE is "connect" (SourceRecord with
 * envelope) or "json". It counts from the end of the first batch: what came before is start-up.
 */
public final class Drain {
    private static final CountDownLatch DONE = new CountDownLatch(1);
    private static final com.sun.management.OperatingSystemMXBean SYSTEM =
            (com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();

    private long changes;
    private long before;
    private long check;
    private long clock;
    private long cpu;

    /** What each batch goes through; whether a record is the last one is the caller's to say. */
    private interface Take<R> {
        boolean take(R record);
    }

    private <R> void batch(List<R> records, RecordCommitter<R> committer, Take<R> take)
            throws InterruptedException {
        if (DONE.getCount() == 0) {
            return;
        }
        boolean first = clock == 0;
        if (first) {
            clock = System.nanoTime();
            cpu = SYSTEM.getProcessCpuTime();
            before = records.size();
        }
        for (R record : records) {
            changes++;
            committer.markProcessed(record);
            if (take.take(record)) {
                clock = System.nanoTime() - clock;
                cpu = SYSTEM.getProcessCpuTime() - cpu;
                DONE.countDown();
                return;
            }
        }
        committer.markBatchFinished();
    }

    private boolean source(RecordChangeEvent<SourceRecord> event) {
        SourceRecord record = event.record();
        Struct value = (Struct) record.value();
        Struct row = value.getStruct("after") == null ? value.getStruct("before") : value.getStruct("after");
        check += ((Number) row.get(row.schema().fields().get(0))).longValue();
        return record.topic().contains(".finish_");
    }

    private boolean json(ChangeEvent<String, String> event) {
        check += event.value().length();
        return event.destination().contains(".finish_");
    }

    private static Properties properties() {
        Map<String, String> env = System.getenv();
        Properties properties = new Properties();
        properties.putAll(Map.ofEntries(
                Map.entry("name", "drain"),
                Map.entry("connector.class", "io.debezium.connector.postgresql.PostgresConnector"),
                Map.entry("topic.prefix", "drain"),
                Map.entry("plugin.name", "pgoutput"),
                Map.entry("slot.name", env.get("DRAIN_SLOT")),
                Map.entry("publication.name", env.get("DRAIN_PUBLICATION")),
                Map.entry("publication.autocreate.mode", "disabled"),
                Map.entry("database.hostname", env.get("DRAIN_HOST")),
                Map.entry("database.port", env.get("DRAIN_PORT")),
                Map.entry("database.user", env.get("DRAIN_USER")),
                Map.entry("database.password", env.get("PGPASSWORD")),
                Map.entry("database.dbname", env.get("DRAIN_DATABASE")),
                Map.entry("snapshot.mode", "no_data"),
                Map.entry("offset.storage", "org.apache.kafka.connect.storage.MemoryOffsetBackingStore"),
                Map.entry("offset.flush.interval.ms", "60000"),
                // Ten times the defaults, by which it gets faster.
                Map.entry("max.batch.size", "20480"),
                Map.entry("max.queue.size", "81920"),
                Map.entry("poll.interval.ms", "10"),
                Map.entry("tombstones.on.delete", "false"),
                Map.entry("key.converter.schemas.enable", "false"),
                Map.entry("value.converter.schemas.enable", "false")));
        return properties;
    }

    private static void ended(boolean success, String message, Throwable error) {
        if (!success) {
            System.err.println(message + ": " + error);
            Runtime.getRuntime().halt(3);
        }
    }

    private static long resident() throws IOException {
        return Files.readAllLines(Path.of("/proc/self/status")).stream()
                .filter(line -> line.startsWith("VmHWM"))
                .mapToLong(line -> Long.parseLong(line.replaceAll("\\D", "")) * 1024)
                .findFirst().orElse(0);
    }

    public static void main(String[] arguments) throws Exception {
        Drain drain = new Drain();
        DebeziumEngine<?> engine = System.getenv("DRAIN_MODE").equals("json")
                ? DebeziumEngine.create(Json.class).using(properties()).using(Drain::ended)
                        .notifying((records, committer) -> drain.batch(records, committer, drain::json)).build()
                : DebeziumEngine.create(ChangeEventFormat.of(Connect.class)).using(properties()).using(Drain::ended)
                        .notifying((records, committer) -> drain.batch(records, committer, drain::source)).build();
        Executors.newSingleThreadExecutor().execute(engine);
        DONE.await();
        String version = DebeziumEngine.class.getPackage().getImplementationVersion();
        double share = (double) drain.changes / (drain.changes - drain.before);
        System.out.printf(
                "{\"version\":\"%s\",\"changes\":%d,\"wall\":%.6f,\"cpu\":%.6f,\"memory\":%d,\"check\":%d}%n",
                version, drain.changes, drain.clock / 1e9 * share, drain.cpu / 1e9 * share, resident(), drain.check);
        System.out.flush();
        Runtime.getRuntime().halt(0);
    }
}
