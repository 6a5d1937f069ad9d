"""Statements of both daemons: the lag of the two queues.

Every count is capped, so that a look costs the same with a thousand and with a hundred million rows; the oldest
row is one probe of an index. ``{schema}`` is the quoted schema name (common/schema.py).
"""

CAP = 10_000
"""Counts stop here; a gauge that shows the cap means "this many or more"."""

# Index: outbox_fresh, outbox_retry, outbox_keyed (each capped), outbox_quarantined. No locks.
# The oldest open row of each source: the head of its index by id; of the retried rows the oldest of the
# first thousand by next_attempt_at, for their index is by time.
OUTBOX_LAG = f"""
SELECT
    (SELECT count(*) FROM (SELECT FROM {{schema}}.outbox
        WHERE published_at IS NULL AND quarantined_at IS NULL AND next_attempt_at IS NULL AND ordering_key IS NULL
        LIMIT {CAP}) AS fresh) AS fresh,
    (SELECT count(*) FROM (SELECT FROM {{schema}}.outbox
        WHERE published_at IS NULL AND quarantined_at IS NULL AND next_attempt_at IS NOT NULL AND ordering_key IS NULL
        LIMIT {CAP}) AS retrying) AS retrying,
    (SELECT count(*) FROM (SELECT FROM {{schema}}.outbox
        WHERE published_at IS NULL AND ordering_key IS NOT NULL
        LIMIT {CAP}) AS keyed) AS keyed,
    (SELECT count(*) FROM (SELECT FROM {{schema}}.outbox
        WHERE quarantined_at IS NOT NULL
        LIMIT {CAP}) AS quarantined) AS quarantined,
    least(
        (SELECT created_at FROM {{schema}}.outbox
            WHERE published_at IS NULL AND quarantined_at IS NULL AND next_attempt_at IS NULL AND ordering_key IS NULL
            ORDER BY id LIMIT 1),
        (SELECT min(created_at) FROM (SELECT created_at FROM {{schema}}.outbox
            WHERE published_at IS NULL AND quarantined_at IS NULL AND next_attempt_at IS NOT NULL
                AND ordering_key IS NULL
            ORDER BY next_attempt_at LIMIT 1000) AS retrying),
        (SELECT created_at FROM {{schema}}.outbox
            WHERE published_at IS NULL AND ordering_key IS NOT NULL AND quarantined_at IS NULL
            ORDER BY id LIMIT 1)
    ) AS oldest_created_at,
    clock_timestamp() AS observed_at
"""

# Index: deliveries_due, one probe for each app for the oldest and capped ranges for the counts;
# deliveries_finished for the failed rows of the last day. No locks.
# Leased rows (claimed, lease in the future) and rows that back off are not due: they are not late.
DELIVERIES_LAG = f"""
SELECT want.app,
    (SELECT count(*) FROM (SELECT FROM {{schema}}.notification_deliveries AS d
        WHERE d.app = want.app AND d.status IN ('pending', 'claimed') AND d.next_attempt_at <= now()
        ORDER BY d.next_attempt_at LIMIT {CAP}) AS due) AS due,
    later.leased, later.waiting,
    (SELECT min(d.next_attempt_at) FROM {{schema}}.notification_deliveries AS d
        WHERE d.app = want.app AND d.status IN ('pending', 'claimed') AND d.next_attempt_at <= now()) AS oldest_due_at,
    clock_timestamp() AS observed_at
FROM unnest($1::text[]) AS want (app)
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE status = 'claimed') AS leased, count(*) FILTER (WHERE status = 'pending') AS waiting
    FROM (SELECT d.status FROM {{schema}}.notification_deliveries AS d
        WHERE d.app = want.app AND d.status IN ('pending', 'claimed') AND d.next_attempt_at > now()
        ORDER BY d.next_attempt_at LIMIT {CAP}) AS future) AS later
"""

# Index: deliveries_due, one probe for each app that has open rows (a loose index scan). No locks.
# It finds the rows of apps that no drain is configured for: nobody claims them.
DELIVERIES_APPS = """
WITH RECURSIVE apps AS (
    (SELECT app FROM {schema}.notification_deliveries
        WHERE status IN ('pending', 'claimed') ORDER BY app LIMIT 1)
    UNION ALL
    SELECT (SELECT d.app FROM {schema}.notification_deliveries AS d
        WHERE d.status IN ('pending', 'claimed') AND d.app > apps.app ORDER BY d.app LIMIT 1)
    FROM apps WHERE apps.app IS NOT NULL
)
SELECT app FROM apps WHERE app IS NOT NULL LIMIT 1000
"""

# Index: deliveries_finished (status, finished_at), a capped range of the last day. No locks.
DELIVERIES_DEAD = f"""
SELECT count(*) AS dead
FROM (SELECT FROM {{schema}}.notification_deliveries
    WHERE status = 'failed' AND finished_at > now() - interval '1 day' LIMIT {CAP}) AS failed
"""

# No index: one row for each backend. A session that holds a snapshot keeps dead rows alive and slows every
# claim; relay's own transactions are bounded by their deadline. Needs pg_monitor to see other roles' sessions.
OLDEST_TRANSACTION = """
SELECT min(xact_start) FROM pg_stat_activity
WHERE datname = current_database() AND backend_xmin IS NOT NULL AND pid <> pg_backend_pid()
"""

# No table. True on a standby, after a failover, and where the role's or the database's default refuses writes.
READ_ONLY = "SELECT pg_is_in_recovery() OR current_setting('default_transaction_read_only')::boolean"

# pg_namespace, pg_class, pg_attribute by name; asks nothing of the tables themselves, so it answers whatever the role
# may do. $1 schema; for each privilege $2 table, $3 privilege, $4 column (null: the whole table).
# Returns those that the role lacks; a table that is not there counts as lacking.
LACKING_PRIVILEGES = """
SELECT want.table_name, want.privilege, want.column_name
FROM unnest($2::text[], $3::text[], $4::text[]) WITH ORDINALITY
    AS want (table_name, privilege, column_name, position)
LEFT JOIN pg_namespace AS n ON n.nspname = $1
LEFT JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = want.table_name
WHERE NOT coalesce(CASE WHEN want.column_name IS NULL THEN has_table_privilege(c.oid, want.privilege)
                        ELSE has_table_privilege(c.oid, want.privilege)
                            OR has_column_privilege(c.oid, want.column_name, want.privilege) END, false)
ORDER BY want.position
"""

# pg_namespace by name. $1 schema.
SCHEMA_USAGE = "SELECT has_schema_privilege(oid, 'USAGE') FROM pg_namespace WHERE nspname = $1"

# One row of a system view: this very session, as the server sees it.
SESSION = """
SELECT current_setting('server_version_num')::integer AS version, current_setting('server_version') AS version_text,
    current_user AS role, pg_backend_pid() AS pid, clock_timestamp() AS now,
    (SELECT s.version || ' ' || s.cipher FROM pg_stat_ssl AS s WHERE s.pid = pg_backend_pid() AND s.ssl) AS tls
"""
