"""``python -m deploy.live``: what ``./deploy/up`` runs when the machine is set up.

Exit codes: 0 all accounted for; 1 something was lost, stuck, not as promised, or could not start; 2 wrong use.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

import psycopg

from deploy.live.account import draw_up, lines, run_empty
from deploy.live.board import Output, connect_lines, watch
from deploy.live.drills import play
from deploy.live.figures import Sampler
from deploy.live.folder import RunFolder
from deploy.live.options import Options, parse
from deploy.live.signals import AtOnce, Interrupted, Signals
from deploy.live.stack import Stack
from deploy.local.processes import StartFailed

WARM_UP = 3.0
"""Seconds of traffic before a drill, from the first delivery on."""
WARM_UP_TIMEOUT = 30.0


class Run:
    """One run, from an empty folder to the account."""

    def __init__(self, options: Options, signals: Signals) -> None:
        self.options, self.signals = options, signals
        self.output = Output(signals)
        self.folder: RunFolder | None = None
        self.stack: Stack | None = None

    def run(self) -> int:
        """Start, show, play, count, stop; return the exit code."""
        try:
            self.folder = RunFolder(keep=self.options.keep, fresh=self.options.fresh)
            self.stack = self.start(self.folder)
            sampler = Sampler(self.stack)
            good = self.show(self.stack, sampler)
            good = self.finish(self.stack, sampler) and good
        except Interrupted:
            self.output.say("stopped while it was starting; nothing was counted")
            return 1
        except (StartFailed, psycopg.Error, OSError) as error:
            self.output.say(f"./deploy/up: {error}")
            return 1
        finally:
            self.close()
        return 0 if good else 1

    def start(self, folder: RunFolder) -> Stack:
        """Start everything in a thread, so that a signal is heard meanwhile."""
        began = time.monotonic()
        if folder.found:
            self.output.say(f"goes on with the data of {folder.path}")
        stack = Stack(folder, self.options, self.output.say, lambda: self.signals.requested)
        self.stack = stack  # to be closed, however far the start comes
        failure: list[BaseException] = []

        def start() -> None:
            try:
                stack.start()
            except BaseException as error:  # raised again in the main thread
                failure.append(error)

        thread = threading.Thread(target=start, name="start", daemon=True)
        thread.start()
        said = False
        while thread.is_alive():
            thread.join(0.1)
            if self.signals.requested and not said:
                said = True
                self.output.say("stopping as soon as what is starting has started")
        if failure:
            raise failure[0]
        self.output.say(f"all of it runs after {time.monotonic() - began:.1f} s; to look inside:")
        for line in connect_lines(stack):
            self.output.say(line)
        return stack

    def show(self, stack: Stack, sampler: Sampler) -> bool:
        """The board, or the drills; say whether what they promised came true."""
        title = f"Relay & Drain at {self.options.rate:g} orders per second"
        if not self.options.drills:
            watch(stack, sampler, self.signals, self.output, self.options.seconds, title)
            return True
        self.output.say("traffic first: the drill is played on a chain that runs")
        try:
            self.signals.until(lambda: sampler.take().tables.sent > stack.sent_before, WARM_UP_TIMEOUT, 0.5)
        except Interrupted:
            return False
        self.signals.wait(WARM_UP)
        good = True
        for name in self.options.drills:
            if self.signals.requested:
                return False
            good = play(name, stack, sampler, self.signals, self.output.say) and good
        return good

    def finish(self, stack: Stack, sampler: Sampler) -> bool:
        """Let the pipeline run empty, draw up the account, end everything in order."""
        self.output.say("the producer stops; what was written runs to its end")
        stack.producer.stop()
        figures = run_empty(sampler, self.output.say)
        account = draw_up(stack, sampler, figures)
        sampler.close()
        self.output.say("final account")
        for line in lines(account):
            self.output.say(f"  {line}")
        bad = stack.settle()
        for name, code in bad:
            self.output.say(f"  {name} ended with exit code {code}")
        if self.options.keep:
            self.output.say(f"the data are kept in {stack.folder.path}; --keep goes on with them")
        return account.good and not bad

    def close(self) -> None:
        """End what still runs, remove the folder."""
        if self.stack is not None:
            self.stack.kill()
        if self.folder is not None:
            self.folder.close()


def main() -> int:
    """Run; a second signal kills every process of the run by its id and leaves."""
    options = parse()
    signals = Signals()
    signals.install()
    logging.getLogger().addHandler(logging.NullHandler())  # the tap's library; what matters is on the board
    run = Run(options, signals)
    try:
        return run.run()
    except AtOnce:
        signals.ignore()
        run.close()
        run.output.say("stopped at once; nothing was counted")
        sys.stdout.flush()
        # A thread may still wait for a start; what it started last is ended by the guard (deploy/local/guard.py).
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
