// pg_walstream: a peer of drain.py. DRAIN_MODE is "raw", undecoded messages, or "typed", events whose
// rows serde makes a struct per table of: integers, floats and bool typed, all else String.
use pg_walstream::{CancellationToken, EventType, LogicalReplicationStream, ReplicationStreamConfig, RowData};
use serde::Deserialize;
use std::time::Instant;

const VERSION: &str = "0.10.0, libpq";

/// The process's seconds of CPU so far.
fn cpu() -> f64 {
    let mut used: libc::rusage = unsafe { std::mem::zeroed() };
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut used) };
    let seconds = (used.ru_utime.tv_sec + used.ru_stime.tv_sec) as f64;
    seconds + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) as f64 / 1e6
}

/// The greatest resident size, in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

macro_rules! rows {
    ($($name:ident { $key:ident, $($field:ident: $kind:ty),* })*) => {
        $(#[allow(dead_code)] #[derive(Deserialize)] struct $name { $key: i64, $($field: Option<$kind>),* })*
    };
}

rows! {
    Finish { id, note: String }
    Narrow { id, a: i32, t: String, n: String, ts: String, b: bool }
    Accounts { aid, bid: i32, abalance: String, filler: String, mtime: String }
    Orders { oid, aid: i64, qty: i32, price: String, paid: bool, note: String, at: String }
    Docs { id, version: i32, body: String, tag: String }
    Wide { id,
        c00: i32, c01: i64, c02: String, c03: String, c04: String, c05: String, c06: String, c07: String, c08: bool, c09: f64,
        c10: i32, c11: i64, c12: String, c13: String, c14: String, c15: String, c16: String, c17: String, c18: bool, c19: f64,
        c20: i32, c21: i64, c22: String, c23: String, c24: String, c25: String, c26: String, c27: String, c28: bool }
}

/// A row as its struct; the key.
fn typed(table: &str, row: &RowData) -> i64 {
    macro_rules! key {
        ($kind:ty, $key:ident) => {
            std::hint::black_box(row.deserialize_into::<$kind>().unwrap()).$key
        };
    }
    match table {
        "narrow" => key!(Narrow, id),
        "wide" => key!(Wide, id),
        "accounts" => key!(Accounts, aid),
        "orders" => key!(Orders, oid),
        "docs" => key!(Docs, id),
        _ => key!(Finish, id),
    }
}

#[tokio::main]
async fn main() {
    let env = |name: &str| std::env::var(name).unwrap();
    let end: u64 = env("DRAIN_END_LSN").parse().unwrap();
    let url = format!(
        "postgresql://{}:{}@{}:{}/{}?replication=database&sslmode=disable",
        env("DRAIN_USER"), env("PGPASSWORD"), env("DRAIN_HOST"), env("DRAIN_PORT"), env("DRAIN_DATABASE")
    );
    let config = ReplicationStreamConfig::builder(env("DRAIN_SLOT"), env("DRAIN_PUBLICATION")).with_protocol_version(2);
    let mut stream = LogicalReplicationStream::new(&url, config).await.unwrap();
    stream.start(None).await.unwrap();
    let cancel = CancellationToken::new();
    let (mut changes, mut check) = (0i64, 0i64);
    let mut started: Option<(Instant, f64)> = None;
    if env("DRAIN_MODE") == "raw" {
        loop {
            let message = stream.next_raw_event(&cancel).await.unwrap();
            started.get_or_insert_with(|| (Instant::now(), cpu()));
            check += message.data.len() as i64;
            match message.data[0] {
                b'I' | b'U' | b'D' => changes += 1,
                b'C' if u64::from_be_bytes(message.data[10..18].try_into().unwrap()) >= end => break,
                _ => {}
            }
        }
    } else {
        loop {
            let event = stream.next_event(&cancel).await.unwrap();
            started.get_or_insert_with(|| (Instant::now(), cpu()));
            match &event.event_type {
                EventType::Insert { table, data, .. } => {
                    changes += 1;
                    check += typed(table, data);
                }
                EventType::Update { table, old_data, new_data, .. } => {
                    changes += 1;
                    if let Some(old) = old_data {
                        typed(table, old);
                    }
                    check += typed(table, new_data);
                }
                EventType::Delete { table, old_data, .. } => {
                    changes += 1;
                    check += typed(table, old_data);
                }
                EventType::Commit { end_lsn, .. } if end_lsn.value() >= end => break,
                _ => {}
            }
            stream.shared_lsn_feedback.update_applied_lsn(event.lsn.value());
        }
    }
    let (clock, before) = started.unwrap();
    println!(
        "{{\"version\":\"{VERSION}\",\"changes\":{changes},\"wall\":{},\"cpu\":{},\"memory\":{},\"check\":{check}}}",
        clock.elapsed().as_secs_f64(), cpu() - before, resident()
    );
    std::process::exit(0);
}
