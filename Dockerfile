# Captures a slot and keeps tables up to date; without Spark.
#
#     docker build --tag pgoutput-fast .
#     docker run --rm --volume shop:/data pgoutput-fast sync --to duckdb:/data/shop.duckdb …
#
# The connection string is best given as a service or in PGPASSFILE: see docs/how-to/secrets.md.
FROM python:3.13-slim-bookworm AS build
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN python -m venv /app \
    && PGOUTPUT_FAST_REQUIRE_EXT=1 /app/bin/pip install --no-cache-dir \
        '/source[replication,cli,metrics,duckdb,delta]'

FROM python:3.13-slim-bookworm
COPY --from=build /app /app
# /data is for change logs and targets; its volume belongs to this user.
RUN useradd --uid 10001 --user-group --no-create-home pgoutput && install -d -o pgoutput /data
USER 10001:10001
WORKDIR /data
VOLUME /data
STOPSIGNAL SIGTERM
ENTRYPOINT ["/app/bin/pgoutput-fast"]
CMD ["--help"]
