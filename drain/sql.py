"""Every statement of drain. ``{schema}`` is the quoted schema name (common/schema.py).

A claim is a lease, not a lock: the one UPDATE below commits before anything is sent, and no lock or connection is
held while APNs is slow. What makes that safe is ``claim_version``: the claim alone raises it, and every write about
a claimed row has it in its WHERE, so a drain that lost its lease writes to zero rows.
"""

# Index: deliveries_due (app, next_attempt_at), one forward range for each app from $3, the due time last seen: what
# a long snapshot keeps alive below it is not walked over again; $3 is -infinity once in every poll interval, which
# finds rows that became due earlier and committed late. New, retried and expired-lease rows are one case.
# Lock order: next_attempt_at within each app, but no lock is waited for (SKIP LOCKED). The limited select stands in
# a MATERIALIZED CTE: below an IN its plan may run it again and claim more than the limit.
# Fence: this statement is where claim_version goes up. Time: the database's clock alone.
# $1 apps, $2 rows for each, $3 due at or after for each, $4 lease in seconds, $5 name of the claimer.
CLAIM = """
WITH due AS MATERIALIZED (
    SELECT d.id, d.next_attempt_at AS due_at, d.status = 'claimed' AS reclaimed
    FROM unnest($1::text[], $2::integer[], $3::timestamptz[]) AS want (app, slots, due_from)
    CROSS JOIN LATERAL (
        SELECT id, next_attempt_at, status
        FROM {schema}.notification_deliveries
        WHERE app = want.app AND status IN ('pending', 'claimed')
            AND next_attempt_at <= now() AND next_attempt_at >= want.due_from
        ORDER BY next_attempt_at
        LIMIT want.slots
        FOR UPDATE SKIP LOCKED
    ) AS d
)
UPDATE {schema}.notification_deliveries AS d
SET status = 'claimed',
    attempts = d.attempts + 1,
    next_attempt_at = now() + make_interval(secs => $4),
    claim_version = d.claim_version + 1,
    claimed_by = $5
FROM due
WHERE d.id = due.id
RETURNING d.id, d.claim_version, d.notification_id, d.event_id, d.app, d.device_token, d.registered_at, d.push_type,
    d.priority, d.collapse_id, d.expires_at, d.payload::text AS payload, d.coalesce_key, d.headers::text AS headers,
    d.attempts, d.created_at, d.last_reason, now() AS claimed_at, due.due_at, due.reclaimed,
    (SELECT t.dead_since FROM {schema}.device_tokens AS t
        WHERE t.app = d.app AND t.device_token = d.device_token AND t.dead_since IS NOT NULL
            AND (d.registered_at IS NULL OR d.registered_at <= t.dead_since)) AS token_dead_since
"""

# Index: deliveries_coalesce (app, device_token, coalesce_key, id), two probes for each row. No locks.
# It runs after the claim committed and before any push of these rows. Two drains that hold rows of one key each see
# at least one of the other's claims here, for both claims are committed before either looks: the older row finds the
# newer one and is superseded, or the newer one finds the older one in flight and waits. Rows of the same claim
# ($1) are no obstacle to each other: the older ones are superseded by this very look.
CHECK_SIBLINGS = """
SELECT c.id,
    EXISTS (SELECT FROM {schema}.notification_deliveries AS n
        WHERE n.app = c.app AND n.device_token = c.device_token AND n.coalesce_key = c.coalesce_key
            AND n.id > c.id AND n.status IN ('pending', 'claimed', 'sent')) AS superseded,
    EXISTS (SELECT FROM {schema}.notification_deliveries AS n
        WHERE n.app = c.app AND n.device_token = c.device_token AND n.coalesce_key = c.coalesce_key
            AND n.id < c.id AND n.status = 'claimed' AND n.next_attempt_at > now()
            AND n.id <> ALL ($1::bigint[])) AS sibling_in_flight
FROM unnest($1::bigint[], $2::text[], $3::text[], $4::text[]) AS c (id, app, device_token, coalesce_key)
"""

# Index: primary key. Lock order: id, taken by the sorted select before the update, so that two settles can not
# deadlock. Fence: claim_version, checked under the lock; a row that was claimed again, or is terminal, does not
# match and is not in the answer.
# A dead token is written, and its event put into the outbox, in this same statement: all of it commits or nothing.
# One event for each death; none when the application registered the token after Apple's timestamp.
# $1 id, $2 claim_version, $3 status, $4 seconds until due again (null: leave), $5 attempts to give back (0 or 1),
# $6 last_status, $7 last_reason, $8 the token is dead, $9 since when.
SETTLE = """
WITH o AS MATERIALIZED (
    SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::float8[], $5::integer[], $6::integer[],
                         $7::text[], $8::boolean[], $9::timestamptz[])
        AS o (id, claim_version, status, delay, given_back, last_status, last_reason, token_dead, dead_since)
), locked AS MATERIALIZED (
    SELECT d.id
    FROM {schema}.notification_deliveries AS d JOIN o ON o.id = d.id AND o.claim_version = d.claim_version
    WHERE d.status = 'claimed'
    ORDER BY d.id
    FOR UPDATE OF d
), settled AS (
    UPDATE {schema}.notification_deliveries AS d
    SET status = o.status,
        attempts = greatest(0, d.attempts - o.given_back),
        next_attempt_at = CASE WHEN o.delay IS NULL THEN d.next_attempt_at
                               ELSE clock_timestamp() + make_interval(secs => o.delay) END,
        last_status = o.last_status,
        last_reason = o.last_reason,
        finished_at = CASE WHEN o.status = 'pending' THEN NULL ELSE clock_timestamp() END
    FROM locked JOIN o ON o.id = locked.id
    WHERE d.id = locked.id AND d.claim_version = o.claim_version
    RETURNING d.id, d.app, d.device_token, d.notification_id, d.event_id, d.headers, o.token_dead, o.dead_since,
        o.last_reason
), dead AS (
    INSERT INTO {schema}.device_tokens AS t (app, device_token, dead_since, dead_reason, notification_id)
    SELECT DISTINCT ON (app, device_token) app, device_token, dead_since, last_reason, notification_id
    FROM settled WHERE token_dead
    ORDER BY app, device_token, dead_since DESC
    ON CONFLICT (app, device_token) DO UPDATE
        SET dead_since = excluded.dead_since, dead_reason = excluded.dead_reason,
            notification_id = excluded.notification_id
        WHERE t.dead_since IS NULL AND (t.registered_at IS NULL OR t.registered_at <= excluded.dead_since)
    RETURNING t.app, t.device_token, t.dead_since, t.dead_reason, t.notification_id
), feedback AS (
    INSERT INTO {schema}.outbox (aggregate_type, aggregate_id, event_type, payload, headers)
    SELECT 'device_token', dead.device_token, 'device_token.dead',
        jsonb_build_object('app', dead.app, 'device_token', dead.device_token, 'reason', dead.dead_reason,
            'dead_since', dead.dead_since, 'notification_id', dead.notification_id, 'event_id', settled.event_id),
        settled.headers
    FROM dead JOIN settled ON settled.notification_id = dead.notification_id
)
SELECT id FROM settled
"""

# Index: deliveries_finished (status, finished_at), one range for each terminal status, oldest first. Lock order:
# finished_at, nothing is waited for. $1 retention in seconds, $2 rows.
PRUNE = """
WITH old AS MATERIALIZED (
    SELECT d.id
    FROM unnest(ARRAY['sent', 'failed', 'expired', 'superseded']) AS terminal (status)
    CROSS JOIN LATERAL (
        SELECT id FROM {schema}.notification_deliveries
        WHERE status = terminal.status AND finished_at IS NOT NULL
            AND finished_at < now() - make_interval(secs => $1)
        ORDER BY finished_at LIMIT $2 FOR UPDATE SKIP LOCKED
    ) AS d
    LIMIT $2
)
DELETE FROM {schema}.notification_deliveries AS d USING old WHERE d.id = old.id
"""
