"""Every statement of relay. ``{schema}`` is the quoted schema name (common/schema.py).

There are three ways for a row to be claimed, each with an index that holds exactly its rows
(docs/decisions/0002-three-sources.md): fresh, retry, keyed. All lock with ``FOR UPDATE SKIP LOCKED`` inside the
transaction that publishes; a claim never waits for a lock, so two relays can not deadlock. The limited select
stands in a MATERIALIZED CTE or is the statement itself, never below an ``IN``, whose plan may run it again and
lock more than the limit.

The columns are those of ``relay.model.OutboxRow``, in its order.
"""

BEGIN = """
BEGIN;
SET LOCAL idle_in_transaction_session_timeout = {idle};
SET LOCAL statement_timeout = {statement};
SET LOCAL lock_timeout = {lock}
"""
"""One round trip. The server ends the transaction by itself when relay is gone, frozen, or late; plain BEGIN
keeps a read-only default, so that FOR UPDATE refuses (25006) before anything is published. No locks."""

TRANSACTION_TIMEOUT_SINCE = 17
BEGIN_TRANSACTION_TIMEOUT = "; SET LOCAL transaction_timeout = {transaction}"
"""Since PostgreSQL 17: of the whole transaction. Before, the guards above count anew from each statement on."""

_COLUMNS = """o.id, o.event_id, o.aggregate_type, o.aggregate_id, o.event_type, o.exchange, o.routing_key,
    o.ordering_key, coalesce(o.payload_bytes, convert_to(o.payload::text, 'UTF8')) AS body, o.content_type,
    o.headers::text AS headers, o.created_at, o.attempts"""

# Index: outbox_fresh, a forward range from the last seen id: what a long snapshot keeps alive below it is not
# walked over again. $1 is 0 once in every tick: the sweep, which finds rows that committed late with a lower id.
# Lock order: id. Fence: the row lock, held until the commit that marks.
CLAIM_FRESH = f"""
SELECT {_COLUMNS}
FROM {{schema}}.outbox AS o
WHERE o.published_at IS NULL AND o.quarantined_at IS NULL AND o.next_attempt_at IS NULL AND o.ordering_key IS NULL
    AND o.id > $1
ORDER BY o.id
LIMIT $2
FOR UPDATE OF o SKIP LOCKED
"""

# Index: outbox_retry, one range in its own order. Lock order: next_attempt_at, but no lock is waited for.
# Fence: the row lock. Suspects: the publisher sends them one at a time.
CLAIM_RETRY = f"""
SELECT {_COLUMNS}
FROM {{schema}}.outbox AS o
WHERE o.published_at IS NULL AND o.quarantined_at IS NULL AND o.next_attempt_at IS NOT NULL
    AND o.ordering_key IS NULL AND o.next_attempt_at <= now()
ORDER BY o.next_attempt_at
LIMIT $1
FOR UPDATE OF o SKIP LOCKED
"""

# Index: outbox_keyed (ordering_key, id). A loose index scan steps from key to key, $1 the key to start after,
# at most $2 keys, so that a million rows behind one blocked key cost one probe. Of each key only the head, its
# lowest open id, can be claimed, and only when it is neither in quarantine nor backing off: whoever holds the
# lock on the head owns the key. A head that another relay published between this statement's snapshot and its
# lock fails the recheck of the WHERE and is left out; the row behind it was no head in this snapshot.
# Lock order: ordering_key, but no lock is waited for. Fence: the head's row lock.
# Returns, besides the rows, visited_key: the last key looked at, null when the scan reached the end.
CLAIM_HEADS = f"""
WITH RECURSIVE heads AS (
    (SELECT e.ordering_key, e.id, 1 AS visited FROM {{schema}}.outbox AS e
        WHERE e.published_at IS NULL AND e.ordering_key IS NOT NULL AND e.ordering_key > $1
        ORDER BY e.ordering_key, e.id LIMIT 1)
    UNION ALL
    SELECT nxt.ordering_key, nxt.id, heads.visited + 1
    FROM heads CROSS JOIN LATERAL (
        SELECT e.ordering_key, e.id FROM {{schema}}.outbox AS e
        WHERE e.published_at IS NULL AND e.ordering_key IS NOT NULL AND e.ordering_key > heads.ordering_key
        ORDER BY e.ordering_key, e.id LIMIT 1) AS nxt
    WHERE heads.visited < $2
), scan AS MATERIALIZED (
    SELECT ordering_key, id FROM heads
), claimable AS MATERIALIZED (
    SELECT {_COLUMNS}
    FROM scan JOIN {{schema}}.outbox AS o ON o.id = scan.id
    WHERE o.published_at IS NULL AND o.quarantined_at IS NULL
        AND (o.next_attempt_at IS NULL OR o.next_attempt_at <= now())
    ORDER BY o.ordering_key
    LIMIT $3
    FOR UPDATE OF o SKIP LOCKED
)
SELECT claimable.*, seen.visited, seen.last_key
FROM (SELECT count(*) AS visited, max(ordering_key) AS last_key FROM scan) AS seen
LEFT JOIN claimable ON true
"""

# Index: outbox_keyed_age, the newest entry. No locks.
KEYED_NEWEST = """
SELECT id FROM {schema}.outbox WHERE published_at IS NULL AND ordering_key IS NOT NULL ORDER BY id DESC LIMIT 1
"""

# Index: outbox_keyed_age, a forward range from the last seen id $1. No locks. $2 rows.
KEYED_UNSEEN = """
SELECT ordering_key, id FROM {schema}.outbox
WHERE published_at IS NULL AND ordering_key IS NOT NULL AND id > $1
ORDER BY id LIMIT $2
"""

# Index: outbox_keyed (ordering_key, id), one probe for each of the keys $1, from its floor $2: an id that was its
# head before. Rows of a key are published in order, so none below that is open, but for those that committed later
# than a higher id of their key and those that are replayed: passes find them. $3 rows.
# Lock order: ordering_key, but no lock is waited for. Fence: the head's row lock, as above.
# Returns head_key and head_id of every key, and the row of each head that could be locked.
CLAIM_HEADS_OF = f"""
WITH heads AS MATERIALIZED (
    SELECT k.ordering_key, h.id
    FROM unnest($1::text[], $2::bigint[]) AS k (ordering_key, floor)
    CROSS JOIN LATERAL (
        SELECT e.id FROM {{schema}}.outbox AS e
        WHERE e.published_at IS NULL AND e.ordering_key IS NOT NULL
            AND e.ordering_key = k.ordering_key AND e.id >= k.floor
        ORDER BY e.id LIMIT 1) AS h
), claimable AS MATERIALIZED (
    SELECT {_COLUMNS}
    FROM heads JOIN {{schema}}.outbox AS o ON o.id = heads.id
    WHERE o.published_at IS NULL AND o.quarantined_at IS NULL
        AND (o.next_attempt_at IS NULL OR o.next_attempt_at <= now())
    ORDER BY o.ordering_key
    LIMIT $3
    FOR UPDATE OF o SKIP LOCKED
)
SELECT claimable.*, heads.ordering_key AS head_key, heads.id AS head_id
FROM heads LEFT JOIN claimable ON claimable.id = heads.id
"""

# Index: outbox_keyed (ordering_key, id), one short range for each owned key. Runs in the transaction that holds
# the heads' locks, with a snapshot of its own. Takes the rows behind each head ($1 keys, $2 head ids), at most $3
# for each key and $4 in all. SKIP LOCKED leaves out what another session (an operator's) has locked; position
# counts the rows behind the head as they stand, so that the caller cuts a key at its first gap.
# Rows in quarantine or backing off are numbered and not returned: they make such a gap.
# Lock order: (ordering_key, id), nothing is waited for. Fence: the row locks.
CLAIM_FOLLOWERS = f"""
WITH behind AS MATERIALIZED (
    SELECT e.id, e.position
    FROM unnest($1::text[], $2::bigint[]) AS own (ordering_key, head_id)
    CROSS JOIN LATERAL (
        SELECT n.id, row_number() OVER (ORDER BY n.id) AS position
        FROM (SELECT f.id FROM {{schema}}.outbox AS f
            WHERE f.published_at IS NULL AND f.ordering_key IS NOT NULL
                AND f.ordering_key = own.ordering_key AND f.id > own.head_id
            ORDER BY f.id LIMIT $3) AS n) AS e
    ORDER BY e.position
    LIMIT $4
)
SELECT {_COLUMNS}, behind.position
FROM behind JOIN {{schema}}.outbox AS o ON o.id = behind.id
WHERE o.published_at IS NULL AND o.quarantined_at IS NULL
    AND (o.next_attempt_at IS NULL OR o.next_attempt_at <= now())
FOR UPDATE OF o SKIP LOCKED
"""

# Index: primary key. All rows are locked by this transaction already, so no lock is waited for.
# Fence: the same transaction as the claim; a relay that dies leaves nothing marked.
MARK_PUBLISHED = """
UPDATE {schema}.outbox SET published_at = clock_timestamp()
WHERE id = ANY($1::bigint[]) AND published_at IS NULL
"""

# Index: primary key; rows locked already. Fence: the same transaction as the claim.
# $1 id, $2 attempts to add (0 or 1), $3 seconds until the next attempt, $4 error, $5 quarantine now.
MARK_FAILED = """
UPDATE {schema}.outbox AS o
SET attempts = o.attempts + f.burnt,
    next_attempt_at = clock_timestamp() + make_interval(secs => f.delay),
    last_error = f.error,
    quarantined_at = CASE WHEN f.quarantine THEN clock_timestamp() END
FROM unnest($1::bigint[], $2::integer[], $3::float8[], $4::text[], $5::boolean[])
    AS f (id, burnt, delay, error, quarantine)
WHERE o.id = f.id AND o.published_at IS NULL
"""

# Index: outbox_published, oldest first. Lock order: published_at; SKIP LOCKED, so a replay of the same rows is
# not waited for. $1 retention in seconds, $2 rows.
PRUNE_PUBLISHED = """
WITH old AS MATERIALIZED (
    SELECT id FROM {schema}.outbox
    WHERE published_at IS NOT NULL AND published_at < now() - make_interval(secs => $1)
    ORDER BY published_at LIMIT $2 FOR UPDATE SKIP LOCKED
)
DELETE FROM {schema}.outbox AS o USING old WHERE o.id = old.id
"""

# Index: inbox_received, oldest first. $1 retention in seconds, $2 rows.
PRUNE_INBOX = """
WITH old AS MATERIALIZED (
    SELECT consumer, event_id FROM {schema}.inbox
    WHERE received_at < now() - make_interval(secs => $1)
    ORDER BY received_at LIMIT $2 FOR UPDATE SKIP LOCKED
)
DELETE FROM {schema}.inbox AS i USING old WHERE i.consumer = old.consumer AND i.event_id = old.event_id
"""
