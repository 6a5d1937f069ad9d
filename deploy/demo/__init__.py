"""A small shop: the example of an application that uses the outbox, the inbox and the delivery ledger."""
