"""What the board and the account ask the database. ``{schema}`` is the quoted schema name; no locks but MVCC's.

These look at whole tables, for here the account matters more than the cost: a run of hours has some 100,000 rows.
The daemons' own gauges (common/sql.py) are the ones that cost nothing.
"""

# One scan of each table. $1 consumer. Ages in seconds by the database's clock, null: nothing waits.
FIGURES = """
SELECT outbox.*, deliveries.*,
    (SELECT count(*) FROM shop.orders) AS orders,
    (SELECT count(*) FROM shop.notified) AS notified,
    (SELECT count(*) FROM {schema}.inbox WHERE consumer = $1) AS accepted,
    (SELECT count(*) FROM {schema}.device_tokens WHERE dead_since IS NOT NULL) AS dead_tokens,
    (SELECT count(*) FROM shop.customers WHERE device_token IS NULL) AS dead_home
FROM (SELECT count(*) AS written, count(published_at) AS published, count(quarantined_at) AS quarantined,
        (extract(epoch FROM clock_timestamp() - min(created_at)
            FILTER (WHERE published_at IS NULL AND quarantined_at IS NULL)))::float8 AS outbox_age
    FROM {schema}.outbox) AS outbox
CROSS JOIN (SELECT count(*) FILTER (WHERE status = 'pending') AS pending,
        count(*) FILTER (WHERE status = 'claimed') AS claimed, count(*) FILTER (WHERE status = 'sent') AS sent,
        count(*) FILTER (WHERE status = 'failed') AS failed, count(*) FILTER (WHERE status = 'expired') AS expired,
        count(*) FILTER (WHERE status = 'superseded') AS superseded,
        (extract(epoch FROM clock_timestamp() - min(next_attempt_at)
            FILTER (WHERE status IN ('pending', 'claimed') AND next_attempt_at <= now())))::float8 AS due_age
    FROM {schema}.notification_deliveries) AS deliveries
"""

SENT = "SELECT count(*) FROM {schema}.notification_deliveries WHERE status = 'sent'"

# Devices of the last $1 customers, and the time of the database in milliseconds.
LAST_DEVICES = """
SELECT md5('left ' || id) || md5('right ' || id), (extract(epoch FROM clock_timestamp()) * 1000)::bigint
FROM shop.customers ORDER BY id DESC LIMIT $1
"""

# ------------------------------------------------------------------------------------------------------ what was lost
# Each returns at most 1000 ids. The consumer is $1 where there is one.

ORDERS_WITHOUT_EVENT = """
SELECT o.id::text FROM shop.orders AS o
WHERE NOT EXISTS (SELECT FROM {schema}.outbox AS e
    WHERE e.event_type = 'order.placed' AND e.aggregate_id = o.id::text)
LIMIT 1000
"""

# Events that relay marked, of the types that the consumer has bound, and that the consumer has not applied. What is
# not marked is not lost: it stands in the outbox.
PUBLISHED_NOT_APPLIED = """
SELECT e.event_id::text FROM {schema}.outbox AS e
WHERE e.published_at IS NOT NULL AND (e.event_type LIKE 'order.%' OR e.event_type = 'device_token.dead')
    AND NOT EXISTS (SELECT FROM {schema}.inbox AS i WHERE i.consumer = $1 AND i.event_id = e.event_id)
LIMIT 1000
"""

# Applied orders without their delivery. One is rightly missing when the customer's device was known to be dead: its
# event was applied before the order, or within the ten seconds that two open transactions may overlap.
APPLIED_WITHOUT_DELIVERY = """
SELECT e.event_id::text
FROM {schema}.inbox AS i
JOIN {schema}.outbox AS e ON e.event_id = i.event_id AND e.event_type = 'order.placed'
JOIN shop.orders AS o ON o.id::text = e.aggregate_id
WHERE i.consumer = $1
    AND NOT EXISTS (SELECT FROM {schema}.notification_deliveries AS d WHERE d.event_id = e.event_id)
    AND NOT EXISTS (
        SELECT FROM {schema}.outbox AS dead
        JOIN {schema}.inbox AS home ON home.consumer = $1 AND home.event_id = dead.event_id
        WHERE dead.event_type = 'device_token.dead'
            AND dead.aggregate_id = md5('left ' || o.customer_id) || md5('right ' || o.customer_id)
            AND home.received_at < i.received_at + interval '10 seconds')
LIMIT 1000
"""

APPLIED_NOT_NOTIFIED = """
SELECT e.event_id::text
FROM {schema}.inbox AS i
JOIN {schema}.outbox AS e ON e.event_id = i.event_id AND e.event_type = 'order.placed'
WHERE i.consumer = $1 AND NOT EXISTS (SELECT FROM shop.notified AS n WHERE n.order_id::text = e.aggregate_id)
LIMIT 1000
"""

APPLIED_TWICE = "SELECT order_id::text FROM shop.notified WHERE times <> 1 LIMIT 1000"

# ------------------------------------------------------------------------------------------------------ for the drills
# $1 event ids.

EVENTS_OF_ORDERS = """
SELECT event_id::text FROM {schema}.outbox
WHERE event_type = 'order.placed' AND aggregate_id = ANY ($1::text[])
"""

# Rows that nobody has locked. In a transaction that is rolled back.
UNLOCKED_EVENTS = """
SELECT count(*) FROM (SELECT FROM {schema}.outbox WHERE event_id = ANY ($1::uuid[]) FOR UPDATE SKIP LOCKED) AS free
"""
UNLOCKED_DELIVERIES = """
SELECT count(*) FROM (SELECT FROM {schema}.notification_deliveries
    WHERE event_id = ANY ($1::uuid[]) FOR UPDATE SKIP LOCKED) AS free
"""

PUBLISHED = "SELECT count(published_at) FROM {schema}.outbox WHERE event_id = ANY ($1::uuid[])"

APPLIED = "SELECT count(*) FROM {schema}.inbox WHERE consumer = $2 AND event_id = ANY ($1::uuid[])"

# How often the orders of these events were applied, at most; how many there are.
TIMES_APPLIED = """
SELECT max(n.times), count(*) FROM shop.notified AS n JOIN {schema}.outbox AS e ON e.aggregate_id = n.order_id::text
WHERE e.event_id = ANY ($1::uuid[]) AND e.event_type = 'order.placed'
"""

# The whole rows as text, by id: to show that a row was not touched. left: seconds until next_attempt_at.
DELIVERIES = """
SELECT d.id, d.notification_id::text, d.device_token, d.status, d.attempts, d.claim_version, d.claimed_by,
    (extract(epoch FROM d.next_attempt_at - clock_timestamp()))::float8 AS left, to_jsonb(d)::text AS whole
FROM {schema}.notification_deliveries AS d WHERE d.event_id = ANY ($1::uuid[]) ORDER BY d.id
"""

# $1 application_name of the daemon.
SESSIONS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = $1"
)
