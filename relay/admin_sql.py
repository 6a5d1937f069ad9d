"""Every statement of relay's commands. ``{schema}`` is the quoted schema name (common/schema.py).

What a command writes it has read before: the first statement of a command returns the rows, the second writes them
by id, and checks under the lock that each is still as it was read. All writes lock in id order and wait for locks
(lock_timeout bounds that): two commands can not deadlock, and a daemon's claims skip what is locked.

In a selection a parameter that is null is no condition; such conditions fold away, for these statements are planned
for the parameters at hand (a cursor is, and so is a statement's first execution).
"""

from common.sql import CAP

SAMPLE = 5000
"""Rows of each source that a status tells apart by exchange: the oldest ones."""
PARKED = 1000
"""Rows in quarantine that a status tells apart by error: the newest ones."""
KEYS = 500
"""Ordering keys that a status looks at."""
SHOWN_KEYS = 10
BEHIND = 1000
"""Rows behind a blocked key are counted up to here."""

# ------------------------------------------------------------------------------------------------------------- status

# Index: outbox_fresh, outbox_retry, outbox_keyed_age, each a capped range from its oldest row. No locks.
# A keyed row that backs off is keyed here, as in the gauges; one in quarantine is not waiting, yet uses up the sample.
STATUS_EXCHANGES = f"""
SELECT exchange, source, count(*) AS rows, min(created_at) AS oldest
FROM (
    (SELECT exchange, created_at, 'fresh' AS source FROM {{schema}}.outbox
        WHERE published_at IS NULL AND quarantined_at IS NULL AND next_attempt_at IS NULL AND ordering_key IS NULL
        ORDER BY id LIMIT {SAMPLE})
    UNION ALL
    (SELECT exchange, created_at, 'retrying' FROM {{schema}}.outbox
        WHERE published_at IS NULL AND quarantined_at IS NULL AND next_attempt_at IS NOT NULL
            AND ordering_key IS NULL
        ORDER BY next_attempt_at LIMIT {SAMPLE})
    UNION ALL
    (SELECT exchange, created_at, CASE WHEN quarantined_at IS NULL THEN 'keyed' ELSE 'parked' END
        FROM {{schema}}.outbox
        WHERE published_at IS NULL AND ordering_key IS NOT NULL
        ORDER BY id LIMIT {SAMPLE})
) AS waiting
GROUP BY exchange, source
"""

# Index: outbox_published, backwards from the newest, at most CAP rows. No locks.
STATUS_RATE = f"""
SELECT exchange, count(*) AS rows, min(published_at) AS first, max(published_at) AS last
FROM (SELECT exchange, published_at FROM {{schema}}.outbox
    WHERE published_at IS NOT NULL AND published_at > now() - make_interval(secs => $1)
    ORDER BY published_at DESC LIMIT {CAP}) AS newest
GROUP BY exchange
"""

# Index: outbox_published, one probe. No locks.
STATUS_LAST_PUBLISHED = """
SELECT published_at FROM {schema}.outbox WHERE published_at IS NOT NULL ORDER BY published_at DESC LIMIT 1
"""

# Index: outbox_quarantined, backwards from the newest, at most PARKED rows. No locks.
STATUS_QUARANTINED = f"""
SELECT exchange, event_type, last_error, count(*) AS rows, min(quarantined_at) AS first, max(quarantined_at) AS last,
    array_agg(DISTINCT ordering_key) FILTER (WHERE ordering_key IS NOT NULL) AS keys
FROM (SELECT exchange, event_type, last_error, quarantined_at, ordering_key FROM {{schema}}.outbox
    WHERE quarantined_at IS NOT NULL
    ORDER BY quarantined_at DESC LIMIT {PARKED}) AS newest
GROUP BY exchange, event_type, last_error
"""

# Index: outbox_keyed (ordering_key, id): a loose index scan over the heads of the first KEYS keys, the same steps as
# relay.sql.CLAIM_HEADS takes, and one probe for the head of each key of $1: keys that have a row in quarantine.
# A key is blocked when its head is in quarantine or backs off. No locks.
STATUS_HEADS = f"""
WITH RECURSIVE heads AS (
    (SELECT e.ordering_key, e.id, 1 AS visited FROM {{schema}}.outbox AS e
        WHERE e.published_at IS NULL AND e.ordering_key IS NOT NULL
        ORDER BY e.ordering_key, e.id LIMIT 1)
    UNION ALL
    SELECT nxt.ordering_key, nxt.id, heads.visited + 1
    FROM heads CROSS JOIN LATERAL (
        SELECT e.ordering_key, e.id FROM {{schema}}.outbox AS e
        WHERE e.published_at IS NULL AND e.ordering_key IS NOT NULL AND e.ordering_key > heads.ordering_key
        ORDER BY e.ordering_key, e.id LIMIT 1) AS nxt
    WHERE heads.visited < {KEYS}
), scan AS MATERIALIZED (
    SELECT ordering_key, id FROM heads
    UNION
    SELECT h.ordering_key, h.id
    FROM unnest($1::text[]) AS parked (ordering_key)
    CROSS JOIN LATERAL (
        SELECT e.ordering_key, e.id FROM {{schema}}.outbox AS e
        WHERE e.published_at IS NULL AND e.ordering_key IS NOT NULL AND e.ordering_key = parked.ordering_key
        ORDER BY e.ordering_key, e.id LIMIT 1) AS h
)
SELECT seen.visited, blocked.*
FROM (SELECT count(*) AS visited FROM heads) AS seen
LEFT JOIN (
    SELECT scan.ordering_key, o.id, o.quarantined_at, o.next_attempt_at, o.attempts, o.last_error
    FROM scan JOIN {{schema}}.outbox AS o ON o.id = scan.id
    WHERE o.quarantined_at IS NOT NULL OR o.next_attempt_at > now()) AS blocked ON true
"""

# Index: outbox_keyed (ordering_key, id), one capped range for each key of $1. No locks.
STATUS_BEHIND = f"""
SELECT want.ordering_key,
    (SELECT count(*) FROM (SELECT FROM {{schema}}.outbox AS o
        WHERE o.published_at IS NULL AND o.ordering_key IS NOT NULL AND o.ordering_key = want.ordering_key
        LIMIT {BEHIND + 1}) AS open) - 1 AS behind
FROM unnest($1::text[]) AS want (ordering_key)
"""

# --------------------------------------------------------------------------------------------------------- quarantine

_QUARANTINE_FILTER = """o.quarantined_at IS NOT NULL
    AND ($1::bigint[] IS NULL OR o.id = ANY ($1))
    AND ($2::text[] IS NULL OR o.event_type = ANY ($2))
    AND ($3::text IS NULL OR strpos(lower(o.last_error), lower($3)) > 0)
    AND ($4::timestamptz IS NULL OR o.quarantined_at >= $4)
    AND ($5::timestamptz IS NULL OR o.quarantined_at < $5)
ORDER BY o.quarantined_at, o.id
LIMIT $6"""

# Index: outbox_quarantined, oldest first; primary key for ids. No locks.
# $1 ids, $2 event types, $3 part of the error, $4 since, $5 before, $6 rows at most.
SELECT_QUARANTINED = f"""
SELECT o.id, o.event_type, o.last_error, o.ordering_key IS NOT NULL AS keyed
FROM {{schema}}.outbox AS o WHERE {_QUARANTINE_FILTER}
"""

# As SELECT_QUARANTINED.
LIST_QUARANTINED = f"""
SELECT o.id, o.event_id, o.event_type, o.aggregate_type, o.aggregate_id, o.exchange, o.routing_key, o.ordering_key,
    o.attempts, o.quarantined_at, o.last_error
FROM {{schema}}.outbox AS o WHERE {_QUARANTINE_FILTER}
"""

# As SELECT_QUARANTINED.
SHOW_QUARANTINED = f"""
SELECT o.id, o.event_id, o.event_type, o.aggregate_type, o.aggregate_id, o.exchange, o.routing_key, o.ordering_key,
    o.attempts, o.created_at, o.quarantined_at, o.last_error, o.content_type, o.headers::text AS headers,
    o.payload::text AS payload, o.payload_bytes
FROM {{schema}}.outbox AS o WHERE {_QUARANTINE_FILTER}
"""

# Index: primary key. Lock order: id. Fence: still in quarantine, checked under the lock. relay never claims such a
# row, so nothing is in flight. It is as new afterwards: all its attempts, at once; a keyed one frees its key.
RELEASE_QUARANTINED = """
WITH locked AS MATERIALIZED (
    SELECT id FROM {schema}.outbox
    WHERE id = ANY ($1::bigint[]) AND quarantined_at IS NOT NULL
    ORDER BY id FOR UPDATE
), released AS (
    UPDATE {schema}.outbox AS o SET quarantined_at = NULL, attempts = 0, next_attempt_at = NULL
    FROM locked WHERE o.id = locked.id
    RETURNING o.id
)
SELECT count(*) FROM released
"""

# Index: primary key. Lock order: id. Fence: still in quarantine, checked under the lock.
PURGE_QUARANTINED = """
WITH locked AS MATERIALIZED (
    SELECT id FROM {schema}.outbox
    WHERE id = ANY ($1::bigint[]) AND quarantined_at IS NOT NULL
    ORDER BY id FOR UPDATE
), purged AS (
    DELETE FROM {schema}.outbox AS o USING locked WHERE o.id = locked.id
    RETURNING o.id
)
SELECT count(*) FROM purged
"""

# ------------------------------------------------------------------------------------------------------------- replay

# Index: outbox_published for times, primary key for ids, outbox_event_id_key for event ids; event type and aggregate
# alone read every published row. No locks.
# $1 ids, $2 event ids, $3 event types, $4 aggregate type, $5 aggregate id, $6 published from, $7 published before,
# $8 rows at most, the oldest publication first.
SELECT_PUBLISHED = """
SELECT o.id, o.event_type, o.exchange, o.ordering_key IS NOT NULL AS keyed
FROM {schema}.outbox AS o
WHERE o.published_at IS NOT NULL
    AND ($1::bigint[] IS NULL OR o.id = ANY ($1))
    AND ($2::uuid[] IS NULL OR o.event_id = ANY ($2))
    AND ($3::text[] IS NULL OR o.event_type = ANY ($3))
    AND ($4::text IS NULL OR o.aggregate_type = $4)
    AND ($5::text IS NULL OR o.aggregate_id = $5)
    AND ($6::timestamptz IS NULL OR o.published_at >= $6)
    AND ($7::timestamptz IS NULL OR o.published_at < $7)
ORDER BY o.published_at
LIMIT $8
"""

# Index: primary key. Lock order: id. Fence: still published, checked under the lock. The event_id stays. A fresh row
# again: the sweep of each relay (relay/claim.py) finds it below its cursor within a tick.
REPLAY = """
WITH locked AS MATERIALIZED (
    SELECT id FROM {schema}.outbox
    WHERE id = ANY ($1::bigint[]) AND published_at IS NOT NULL
    ORDER BY id FOR UPDATE
), replayed AS (
    UPDATE {schema}.outbox AS o
    SET published_at = NULL, attempts = 0, next_attempt_at = NULL, last_error = NULL
    FROM locked WHERE o.id = locked.id
    RETURNING o.id
)
SELECT count(*) FROM replayed
"""

# -------------------------------------------------------------------------------------------------------------- prune

# Index: outbox_published, the range that PRUNE_PUBLISHED deletes. No locks. $1 retention in seconds.
COUNT_PUBLISHED = """
SELECT count(*) FROM {schema}.outbox
WHERE published_at IS NOT NULL AND published_at < now() - make_interval(secs => $1)
"""

# Index: inbox_received, the range that PRUNE_INBOX deletes. No locks. $1 retention in seconds.
COUNT_INBOX = """
SELECT count(*) FROM {schema}.inbox WHERE received_at < now() - make_interval(secs => $1)
"""

# Index: outbox_quarantined, the range that PRUNE_QUARANTINED deletes. No locks. $1 age in seconds.
COUNT_QUARANTINED = """
SELECT count(*) FROM {schema}.outbox
WHERE quarantined_at IS NOT NULL AND quarantined_at < now() - make_interval(secs => $1)
"""

# Index: outbox_quarantined, oldest first; nothing is waited for. Only by `relay prune --quarantined`: the daemon
# never deletes a row that was not published. $1 age in seconds, $2 rows.
PRUNE_QUARANTINED = """
WITH old AS MATERIALIZED (
    SELECT id FROM {schema}.outbox
    WHERE quarantined_at IS NOT NULL AND quarantined_at < now() - make_interval(secs => $1)
    ORDER BY quarantined_at, id LIMIT $2 FOR UPDATE SKIP LOCKED
)
DELETE FROM {schema}.outbox AS o USING old WHERE o.id = old.id
"""

# -------------------------------------------------------------------------------------------------------------- check

# No index: one row. tgenabled: O and A fire in an ordinary session, D never, R only in a replica's.
WAKEUP_TRIGGER = """
SELECT tgenabled IN ('O', 'A') FROM pg_trigger
WHERE tgrelid = to_regclass($1) AND tgname = 'outbox_wakeup' AND NOT tgisinternal
"""
