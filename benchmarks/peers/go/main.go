// pglogrepl as its example uses it: a peer of drain.py. DRAIN_MODE is "parse", messages whose columns
// stay bytes, or "typed", each column decoded by pgtype into a map.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgtype"
)

const statusInterval = 10 * time.Second

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}

// cpu is the process's seconds of CPU so far.
func cpu() float64 {
	var used syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_SELF, &used)
	return float64(used.Utime.Nano()+used.Stime.Nano()) / 1e9
}

// resident is the greatest resident size, in bytes.
func resident() int64 {
	for _, line := range strings.Split(string(must(os.ReadFile("/proc/self/status"))), "\n") {
		if strings.HasPrefix(line, "VmHWM:") {
			return must(strconv.ParseInt(strings.Fields(line)[1], 10, 64)) * 1024
		}
	}
	return 0
}

type drain struct {
	types     *pgtype.Map
	relations map[uint32]*pglogrepl.RelationMessageV2
	typed     bool
	changes   int64
	check     int64
	last      map[string]any // kept, so that no compiler leaves it out
}

func (d *drain) row(relation uint32, tuple *pglogrepl.TupleData, isChange bool) {
	if isChange {
		d.changes++
	}
	if !d.typed || tuple == nil {
		return
	}
	columns := d.relations[relation].Columns
	values := make(map[string]any, len(columns))
	for i, column := range tuple.Columns {
		name, oid := columns[i].Name, columns[i].DataType
		switch column.DataType {
		case pglogrepl.TupleDataTypeNull:
			values[name] = nil
		case pglogrepl.TupleDataTypeText:
			if known, ok := d.types.TypeForOID(oid); ok {
				values[name] = must(known.Codec.DecodeValue(d.types, oid, pgtype.TextFormatCode, column.Data))
			} else {
				values[name] = string(column.Data)
			}
		}
	}
	if key, ok := values[columns[0].Name].(int64); ok && isChange {
		d.check += key
	}
	d.last = values
}

// take is true at the last commit.
func (d *drain) take(data []byte, end pglogrepl.LSN) bool {
	switch message := must(pglogrepl.ParseV2(data, false)).(type) {
	case *pglogrepl.RelationMessageV2:
		d.relations[message.RelationID] = message
	case *pglogrepl.InsertMessageV2:
		d.row(message.RelationID, message.Tuple, true)
	case *pglogrepl.UpdateMessageV2:
		d.row(message.RelationID, message.OldTuple, false)
		d.row(message.RelationID, message.NewTuple, true)
	case *pglogrepl.DeleteMessageV2:
		d.row(message.RelationID, message.OldTuple, true)
	case *pglogrepl.CommitMessage:
		return message.TransactionEndLSN >= end
	}
	return false
}

func main() {
	ctx := context.Background()
	env := os.Getenv
	dsn := fmt.Sprintf("host=%s port=%s user=%s dbname=%s sslmode=disable replication=database",
		env("DRAIN_HOST"), env("DRAIN_PORT"), env("DRAIN_USER"), env("DRAIN_DATABASE"))
	connection := must(pgconn.Connect(ctx, dsn))
	err := pglogrepl.StartReplication(ctx, connection, env("DRAIN_SLOT"), 0,
		pglogrepl.StartReplicationOptions{PluginArgs: []string{
			"proto_version '2'", "publication_names '" + env("DRAIN_PUBLICATION") + "'"}})
	if err != nil {
		log.Fatal(err)
	}
	end := pglogrepl.LSN(must(strconv.ParseUint(env("DRAIN_END_LSN"), 10, 64)))
	d := drain{types: pgtype.NewMap(), relations: map[uint32]*pglogrepl.RelationMessageV2{},
		typed: env("DRAIN_MODE") == "typed"}
	var position pglogrepl.LSN
	var start time.Time
	var before float64
	due := time.Now().Add(statusInterval)
	for done := false; !done; {
		if time.Now().After(due) {
			err := pglogrepl.SendStandbyStatusUpdate(ctx, connection,
				pglogrepl.StandbyStatusUpdate{WALWritePosition: position})
			if err != nil {
				log.Fatal(err)
			}
			due = time.Now().Add(statusInterval)
		}
		limited, cancel := context.WithDeadline(ctx, due)
		received, err := connection.ReceiveMessage(limited)
		cancel()
		if pgconn.Timeout(err) {
			continue
		}
		message, ok := must(received, err).(*pgproto3.CopyData)
		if !ok {
			log.Fatalf("unexpected %#v", received)
		}
		switch message.Data[0] {
		case pglogrepl.PrimaryKeepaliveMessageByteID:
			keepalive := must(pglogrepl.ParsePrimaryKeepaliveMessage(message.Data[1:]))
			if keepalive.ReplyRequested {
				due = time.Time{}
			}
		case pglogrepl.XLogDataByteID:
			if start.IsZero() {
				start, before = time.Now(), cpu()
			}
			data := must(pglogrepl.ParseXLogData(message.Data[1:]))
			done = d.take(data.WALData, end)
			position = max(position, data.WALStart)
		}
	}
	wall, used := time.Since(start).Seconds(), cpu()-before
	version := ""
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, dependency := range info.Deps {
			if strings.HasSuffix(dependency.Path, "/pglogrepl") {
				version = dependency.Version
			}
		}
	}
	json.NewEncoder(os.Stdout).Encode(map[string]any{"version": version, "changes": d.changes,
		"wall": wall, "cpu": used, "memory": resident(), "check": d.check})
}
