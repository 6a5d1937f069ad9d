"""Every statement of drain's commands. ``{schema}`` is the quoted schema name (common/schema.py).

What a command writes it has read before: the first statement of a command returns the rows, the second writes them
by id, and checks under the lock that each is still as it was read. All writes lock in id order and wait for locks
(lock_timeout bounds that): two commands can not deadlock, and claims skip what is locked. No command writes to a row
under a live lease, and none touches claim_version: a drain that wakes up late finds its row not claimed by it.

In a selection a parameter that is null is no condition; such conditions fold away, for these statements are planned
for the parameters at hand (a cursor is, and so is a statement's first execution).
"""

SAMPLE = 3000
"""Finished rows of each status, and open rows of each app, that a status looks at: the newest, the first due."""

# ------------------------------------------------------------------------------------------------------------- status

# Index: deliveries_finished (status, finished_at), backwards from the newest, at most SAMPLE rows of each terminal
# status within a day. No locks. $1: rows that finished within so many seconds count as recent.
STATUS_FINISHED = f"""
SELECT terminal.status, f.app, f.last_reason, count(*) AS rows,
    count(*) FILTER (WHERE f.finished_at > now() - make_interval(secs => $1)) AS recent,
    min(f.finished_at) AS first, max(f.finished_at) AS last
FROM unnest(ARRAY['sent', 'failed', 'expired', 'superseded']) AS terminal (status)
CROSS JOIN LATERAL (
    SELECT d.app, d.last_reason, d.finished_at FROM {{schema}}.notification_deliveries AS d
    WHERE d.status = terminal.status AND d.finished_at IS NOT NULL AND d.finished_at > now() - interval '1 day'
    ORDER BY d.finished_at DESC LIMIT {SAMPLE}) AS f
GROUP BY terminal.status, f.app, f.last_reason
"""

# Index: deliveries_due (app, next_attempt_at), the first SAMPLE open rows of each app. No locks. $1 apps.
STATUS_REASONS = f"""
SELECT want.app, d.last_reason, count(*) AS rows, min(d.next_attempt_at) AS next
FROM unnest($1::text[]) AS want (app)
CROSS JOIN LATERAL (
    SELECT o.status, o.last_reason, o.next_attempt_at FROM {{schema}}.notification_deliveries AS o
    WHERE o.app = want.app AND o.status IN ('pending', 'claimed')
    ORDER BY o.next_attempt_at LIMIT {SAMPLE}) AS d
WHERE d.status = 'pending' AND d.last_reason IS NOT NULL
GROUP BY want.app, d.last_reason
"""

# -------------------------------------------------------------------------------------------------------- list, show

_HASH = "left(encode(sha256(convert_to(d.device_token, 'UTF8')), 'hex'), 10)"
"""As common.logs.fingerprint makes it: what logs and lists show of a device token can be searched for."""

# $1 ids, $2 notification ids, $3 apps, $4 part of the reason, $5 device tokens or their hashes, in lower case.
_FILTER = f"""($1::bigint[] IS NULL OR d.id = ANY ($1))
    AND ($2::uuid[] IS NULL OR d.notification_id = ANY ($2))
    AND ($3::text[] IS NULL OR d.app = ANY ($3))
    AND ($4::text IS NULL OR strpos(lower(d.last_reason), lower($4)) > 0)
    AND ($5::text[] IS NULL OR lower(d.device_token) = ANY ($5) OR {_HASH} = ANY ($5))"""

_OPEN = f"""d.status IN ('pending', 'claimed') AND d.status = ANY ($6::text[]) AND {_FILTER}
    AND ($7::timestamptz IS NULL OR d.created_at >= $7)
    AND ($8::timestamptz IS NULL OR d.created_at < $8)"""

_FINISHED = f"""d.finished_at IS NOT NULL AND {_FILTER}
    AND ($7::timestamptz IS NULL OR d.finished_at >= $7)
    AND ($8::timestamptz IS NULL OR d.finished_at < $8)"""

# Index: primary key or deliveries_notification_id_key for ids; open rows from the newest id, or through
# deliveries_due; finished ones through deliveries_finished, backwards, each status by itself. A device or a reason
# alone reads the whole ledger. No locks. $6 statuses, $7 since and $8 before: the end of a finished row, the creation
# of an open one; $9 rows at most, the newest first.
_NEWEST = f"""
FROM (
    (SELECT d.id, d.created_at AS at FROM {{schema}}.notification_deliveries AS d
        WHERE {_OPEN}
        ORDER BY d.id DESC LIMIT $9)
    UNION ALL
    (SELECT f.id, f.at FROM unnest($6::text[]) AS want (status)
        CROSS JOIN LATERAL (
            SELECT d.id, d.finished_at AS at FROM {{schema}}.notification_deliveries AS d
            WHERE d.status = want.status AND {_FINISHED}
            ORDER BY d.finished_at DESC LIMIT $9) AS f)
    ORDER BY at DESC LIMIT $9
) AS newest
JOIN {{schema}}.notification_deliveries AS d ON d.id = newest.id
ORDER BY newest.at DESC, d.id DESC
"""

LIST = f"""
SELECT d.id, d.notification_id, d.app, d.device_token, d.push_type, d.status, d.attempts, d.next_attempt_at,
    d.claimed_by, d.last_status, d.last_reason, d.created_at, d.finished_at
{_NEWEST}"""

SHOW = f"""
SELECT d.id, d.notification_id, d.event_id, d.app, d.device_token, d.registered_at, d.push_type, d.priority,
    d.collapse_id, d.expires_at, d.coalesce_key, d.status, d.attempts, d.next_attempt_at, d.claim_version, d.claimed_by,
    d.last_status, d.last_reason, d.created_at, d.finished_at, d.headers::text AS headers, d.payload::text AS payload
{_NEWEST}"""

# ---------------------------------------------------------------------------------------------------- requeue, cancel

# Index: deliveries_finished (status, finished_at) for times; primary key or deliveries_notification_id_key for ids.
# No locks. Parameters as of LIST, $6 terminal statuses; the first finished first. late: past its expires_at;
# dead: its device token is dead, so that it would end again without a push.
SELECT_FINISHED = f"""
SELECT d.id, d.app, d.status, d.last_reason,
    coalesce(d.expires_at > 'epoch' AND d.expires_at <= now(), false) AS late,
    EXISTS (SELECT FROM {{schema}}.device_tokens AS t
        WHERE t.app = d.app AND t.device_token = d.device_token AND t.dead_since IS NOT NULL
            AND (d.registered_at IS NULL OR d.registered_at <= t.dead_since)) AS dead
FROM {{schema}}.notification_deliveries AS d
WHERE d.status = ANY ($6::text[]) AND {_FINISHED}
ORDER BY d.finished_at
LIMIT $9
"""

# Index: primary key. Lock order: id. Fence: terminal still, checked under the lock; nobody holds a lease on such a
# row, and claim_version stays, so that the outcome of any earlier claim still matches nothing.
# $1 ids, $2 statuses, $3 seconds from now for rows that are past expires_at (null: left as they are).
REQUEUE = """
WITH locked AS MATERIALIZED (
    SELECT id FROM {schema}.notification_deliveries
    WHERE id = ANY ($1::bigint[]) AND status = ANY ($2::text[]) AND finished_at IS NOT NULL
    ORDER BY id FOR UPDATE
), requeued AS (
    UPDATE {schema}.notification_deliveries AS d
    SET status = 'pending', attempts = 0, next_attempt_at = clock_timestamp(), finished_at = NULL,
        expires_at = CASE WHEN $3::float8 IS NOT NULL AND d.expires_at > 'epoch' AND d.expires_at <= clock_timestamp()
                          THEN clock_timestamp() + make_interval(secs => $3) ELSE d.expires_at END
    FROM locked WHERE d.id = locked.id
    RETURNING d.id
)
SELECT count(*) FROM requeued
"""

# Index: deliveries_due; primary key or deliveries_notification_id_key for ids. No locks. Parameters as of LIST,
# $6 open statuses; the first due first. id is null for a row under a live lease: it is being pushed, and is left.
SELECT_OPEN = f"""
SELECT CASE WHEN d.status = 'pending' OR d.next_attempt_at <= now() THEN d.id END AS id, d.app, d.status, d.last_reason
FROM {{schema}}.notification_deliveries AS d
WHERE {_OPEN}
ORDER BY d.next_attempt_at
LIMIT $9
"""

# Index: primary key. Lock order: id. Fence: pending, or claimed with a lease that has run out, checked under the
# lock. A drain that wakes up with the old lease settles nothing: SETTLE asks for status claimed.
CANCEL = """
WITH locked AS MATERIALIZED (
    SELECT id FROM {schema}.notification_deliveries
    WHERE id = ANY ($1::bigint[])
        AND (status = 'pending' OR (status = 'claimed' AND next_attempt_at <= clock_timestamp()))
    ORDER BY id FOR UPDATE
), cancelled AS (
    UPDATE {schema}.notification_deliveries AS d
    SET status = 'failed', last_status = NULL, last_reason = 'Cancelled', finished_at = clock_timestamp()
    FROM locked WHERE d.id = locked.id
    RETURNING d.id
)
SELECT count(*) FROM cancelled
"""

# -------------------------------------------------------------------------------------------------------------- prune

# Index: deliveries_finished (status, finished_at), the ranges that PRUNE deletes. No locks. $1 age in seconds.
COUNT_FINISHED = """
SELECT count(*)
FROM unnest(ARRAY['sent', 'failed', 'expired', 'superseded']) AS terminal (status)
JOIN {schema}.notification_deliveries AS d ON d.status = terminal.status
WHERE d.finished_at IS NOT NULL AND d.finished_at < now() - make_interval(secs => $1)
"""
