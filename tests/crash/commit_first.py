"""The wrong order, kept as a mutant: mark and commit, then publish. Run in place of ``python -m relay run``.

It is what a relay looks like that is afraid of holding a transaction while it publishes. Whatever dies between the
commit and the confirm takes the batch with it for ever.
"""

import asyncio
import sys

from relay import daemon, loop
from relay.cli.main import main
from relay.mark import decide
from relay.model import PUBLISHED


class CommitFirst(loop.Lane):
    """A lane with the two steps swapped."""

    async def relay_batch(self, source):
        await self.publisher.ready(loop.READY_SECONDS)
        async with self.database.connection() as connection:
            await connection.execute(self.begin_statement(connection))
            batch = await self.claimer.claim(connection, source)
            rows = [*batch.rows, *batch.suspects]
            await self.marker.write(connection, decide(rows, [PUBLISHED] * len(rows), self.policy))
            await self.commit(connection)
        if rows:
            await self.publisher.publish(
                rows, asyncio.get_running_loop().time() + self.settings.confirm_timeout
            )
        return batch.more


daemon.Lane = CommitFirst

if __name__ == "__main__":
    sys.exit(main(["run"]))
