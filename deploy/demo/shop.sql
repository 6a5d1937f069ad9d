-- The shop's own tables. They know nothing of relay or drain.
CREATE SCHEMA IF NOT EXISTS shop;
CREATE TABLE IF NOT EXISTS shop.customers (
    id           integer PRIMARY KEY,
    name         text NOT NULL,
    device_token text
);
CREATE TABLE IF NOT EXISTS shop.orders (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer_id integer NOT NULL REFERENCES shop.customers,
    cents       integer NOT NULL,
    placed_at   timestamptz NOT NULL DEFAULT now()
);
-- What the consumer does with an order.placed event: exactly once for each order, whatever comes twice.
CREATE TABLE IF NOT EXISTS shop.notified (
    order_id bigint PRIMARY KEY,
    times    integer NOT NULL
);
INSERT INTO shop.customers (id, name, device_token)
SELECT n, 'Customer ' || n, md5('left ' || n) || md5('right ' || n)
FROM generate_series(1, 200) AS n
ON CONFLICT DO NOTHING;
