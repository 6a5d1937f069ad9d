"""The ground: outbox, delivery ledger, inbox, device tokens, their indexes and SQL functions.

Revision ID: 0001
Revises: none
"""

from migrations.run import execute_sql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create everything of schema version 0001."""
    execute_sql("0001_ground.up.sql")


def downgrade() -> None:
    """Drop everything of schema version 0001, with the rows in it."""
    execute_sql("0001_ground.down.sql")
