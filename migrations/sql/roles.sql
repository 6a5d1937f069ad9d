-- Roles of least privilege. Run it again after every migration; it may be run as often as wanted.
-- The roles can not log in: give each daemon a login of its own that is a member of one of them, e.g.
--     CREATE ROLE relay_login LOGIN PASSWORD '...' IN ROLE {relay};
-- Needs the owner of the schema, with CREATEROLE.
DO $$
DECLARE
    wanted text;
BEGIN
    FOREACH wanted IN ARRAY ARRAY[{relay_name}, {drain_name}, {observer_name}, {producer_name}, {consumer_name}] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = wanted) THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', wanted);
        END IF;
    END LOOP;
    -- To see who holds an old snapshot (alert DatabaseSnapshotHeld) a role must be let see the others' sessions.
    IF (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
        GRANT pg_read_all_stats TO {relay}, {drain}, {observer};
    ELSE
        RAISE NOTICE 'a superuser should run: GRANT pg_read_all_stats TO %, %, %',
            {relay_name}, {drain_name}, {observer_name};
    END IF;
END $$;

-- What an earlier version of this file granted goes; all in one transaction, so nobody is ever without.
REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM {relay}, {drain}, {observer}, {producer}, {consumer};
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {schema} FROM PUBLIC, {relay}, {drain}, {observer}, {producer}, {consumer};
REVOKE ALL ON SCHEMA {schema} FROM {relay}, {drain}, {observer}, {producer}, {consumer};
GRANT USAGE ON SCHEMA {schema} TO {relay}, {drain}, {observer}, {producer}, {consumer};

-- relay: reads events, writes what became of them, prunes. It can not make an event nor change its content, and of
-- the ledger it sees nothing. UPDATE of one column of the inbox is what FOR UPDATE SKIP LOCKED asks for.
GRANT SELECT, DELETE ON {schema}.outbox TO {relay};
GRANT UPDATE (published_at, attempts, next_attempt_at, last_error, quarantined_at) ON {schema}.outbox TO {relay};
GRANT SELECT, DELETE, UPDATE (received_at) ON {schema}.inbox TO {relay};
GRANT SELECT ON {schema}.alembic_version TO {relay};

-- drain: reads deliveries, writes what became of them, prunes, keeps the device tokens. Into the outbox it can put
-- its feedback and nothing else; it can not read an event. expires_at is for the command `drain requeue`.
GRANT SELECT, DELETE ON {schema}.notification_deliveries TO {drain};
GRANT UPDATE (status, attempts, next_attempt_at, claim_version, claimed_by, last_status, last_reason, finished_at,
        expires_at)
    ON {schema}.notification_deliveries TO {drain};
GRANT SELECT, INSERT, UPDATE ON {schema}.device_tokens TO {drain};
GRANT INSERT (aggregate_type, aggregate_id, event_type, payload, headers) ON {schema}.outbox TO {drain};
GRANT SELECT ON {schema}.alembic_version TO {drain};

-- observer: for autoscalers and people. States and times; no content, no device token.
GRANT SELECT (id, event_id, event_type, ordering_key, created_at, published_at, attempts, next_attempt_at, last_error,
        quarantined_at)
    ON {schema}.outbox TO {observer};
GRANT SELECT (id, notification_id, event_id, app, push_type, expires_at, status, attempts, next_attempt_at,
        claim_version, claimed_by, last_status, last_reason, created_at, finished_at)
    ON {schema}.notification_deliveries TO {observer};
GRANT SELECT (app, registered_at, dead_since, dead_reason) ON {schema}.device_tokens TO {observer};
GRANT SELECT ON {schema}.inbox, {schema}.alembic_version TO {observer};

-- producer: writes events and deliveries, by plain INSERT or by the functions; sets no state.
GRANT INSERT (event_id, aggregate_type, aggregate_id, event_type, exchange, routing_key, ordering_key, payload,
        payload_bytes, content_type, headers),
    SELECT (id, event_id) ON {schema}.outbox TO {producer};
GRANT INSERT (notification_id, event_id, app, device_token, registered_at, push_type, priority, collapse_id, expires_at,
        payload, coalesce_key, headers, next_attempt_at),
    SELECT (id, notification_id, event_id, app, device_token) ON {schema}.notification_deliveries TO {producer};
GRANT INSERT (app, device_token, registered_at), SELECT (app, device_token, registered_at),
    UPDATE (registered_at, dead_since, dead_reason, notification_id) ON {schema}.device_tokens TO {producer};
GRANT EXECUTE ON FUNCTION {schema}.enqueue_event, {schema}.enqueue_delivery, {schema}.register_device TO {producer};

-- consumer: asks whether an event is new to it. A consumer that sends notifications is a producer too.
GRANT INSERT (consumer, event_id), SELECT (consumer, event_id) ON {schema}.inbox TO {consumer};
GRANT EXECUTE ON FUNCTION {schema}.accept_event TO {consumer};
