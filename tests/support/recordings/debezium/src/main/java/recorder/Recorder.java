package recorder;

import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.format.Json;
import java.io.PrintStream;
import java.io.Reader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;

/**
 * Runs Debezium by a file of properties, and writes each record's topic, key and value, a line for
 * each of them, until a record of the topic comes that the third argument names.
 */
public final class Recorder {
    private Recorder() {}

    public static void main(String[] arguments) throws Exception {
        Properties properties = new Properties();
        try (Reader reader = Files.newBufferedReader(Path.of(arguments[0]))) {
            properties.load(reader);
        }
        String last = arguments[2];
        CountDownLatch done = new CountDownLatch(1);
        PrintStream out = new PrintStream(Files.newOutputStream(Path.of(arguments[1])), true, StandardCharsets.UTF_8);
        DebeziumEngine<ChangeEvent<String, String>> engine = DebeziumEngine.create(Json.class)
                .using(properties)
                .using((boolean ok, String message, Throwable error) -> {
                    if (!ok) {
                        System.err.println(message);
                        if (error != null) {
                            error.printStackTrace();
                        }
                        Runtime.getRuntime().halt(3);
                    }
                })
                .notifying((List<ChangeEvent<String, String>> records,
                        DebeziumEngine.RecordCommitter<ChangeEvent<String, String>> committer) -> {
                    for (ChangeEvent<String, String> record : records) {
                        out.println(record.destination());
                        out.println(record.key());
                        out.println(record.value());
                        committer.markProcessed(record);
                        if (record.destination().equals(last)) {
                            done.countDown();
                        }
                    }
                    committer.markBatchFinished();
                })
                .build();
        ExecutorService executor = Executors.newSingleThreadExecutor();
        executor.execute(engine);
        done.await();
        out.flush();
        Runtime.getRuntime().halt(0);
    }
}
