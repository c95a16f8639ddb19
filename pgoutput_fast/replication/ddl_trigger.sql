-- pgoutput_fast: tell of each change of the catalogue in the stream, with the transaction that
-- makes it. Run it as a superuser, in the database of the slot; it may be run again. A capture needs
-- messages=True. To remove it: DROP FUNCTION public.pgoutput_fast_ddl() CASCADE.

BEGIN;

CREATE OR REPLACE FUNCTION public.pgoutput_fast_ddl() RETURNS event_trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $function$
DECLARE
    changed oid[];
    everything boolean;
    found bigint;
BEGIN
    IF tg_event = 'sql_drop' THEN
        SELECT array_agg(DISTINCT o.objid) FILTER (WHERE o.classid = 'pg_type'::regclass),
            coalesce(bool_or(o.classid IN ('pg_extension'::regclass, 'pg_namespace'::regclass)), false),
            count(*)
        INTO changed, everything, found
        FROM pg_event_trigger_dropped_objects() AS o
        WHERE NOT o.is_temporary;
    ELSE
        SELECT array_agg(DISTINCT CASE o.classid
                WHEN 'pg_type'::regclass THEN o.objid
                WHEN 'pg_class'::regclass THEN c.reltype
            END) FILTER (WHERE o.classid = 'pg_type'::regclass OR c.reltype <> 0),
            coalesce(bool_or(o.classid IN ('pg_extension'::regclass, 'pg_namespace'::regclass)), false),
            count(*)
        INTO changed, everything, found
        FROM pg_event_trigger_ddl_commands() AS o
        LEFT JOIN pg_class AS c ON o.classid = 'pg_class'::regclass AND c.oid = o.objid
        WHERE o.schema_name IS DISTINCT FROM 'pg_temp';
    END IF;
    IF found > 0 THEN
        PERFORM pg_logical_emit_message(true, 'pgoutput_fast.ddl', json_build_object(
            'tag', tg_tag,
            'types', CASE WHEN NOT everything
                THEN coalesce(to_json(changed::bigint[]), '[]'::json) END
        )::text);
    END IF;
END
$function$;

DROP EVENT TRIGGER IF EXISTS pgoutput_fast_ddl;
DROP EVENT TRIGGER IF EXISTS pgoutput_fast_drop;
CREATE EVENT TRIGGER pgoutput_fast_ddl ON ddl_command_end
    EXECUTE PROCEDURE public.pgoutput_fast_ddl();
CREATE EVENT TRIGGER pgoutput_fast_drop ON sql_drop
    EXECUTE PROCEDURE public.pgoutput_fast_ddl();
ALTER EVENT TRIGGER pgoutput_fast_ddl ENABLE ALWAYS;
ALTER EVENT TRIGGER pgoutput_fast_drop ENABLE ALWAYS;

COMMIT;
