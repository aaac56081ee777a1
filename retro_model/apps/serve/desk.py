"""Bounded queue in front of a model: one question is answered at a time, and a client can ask for its place."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torch import nn

MOST_WAITING = 32
LONGEST_ANSWER = 120.0  # seconds


class Full(Exception):
    """The queue has no room."""


class Stopped(Exception):
    """The answer took too long, or its client has left."""


@dataclass(eq=False)
class Job:
    """A question in the queue. stopped: set when its client leaves."""

    ticket: str | None
    stopped: threading.Event = field(default_factory=threading.Event)
    deadline: float = float("inf")


class Desk:
    """Answers questions one after another in a thread of its own; used from one event loop.

        desk = Desk(model)
        answer = await desk.ask(lambda: model(tokens), ticket="a")
        desk.place("a")  # 0: being answered, 1: next, None: not in the queue

    Args:
        model: its modules check before each of their calls whether the work is still wanted; None: nothing checks.
        most: questions in the queue, the one being answered included.
        seconds: longest answer.
    """

    def __init__(self, model: nn.Module | None = None, *, most: int = MOST_WAITING, seconds: float = LONGEST_ANSWER):
        self.most, self.seconds = most, seconds
        self.line: list[Job] = []
        self.mean = 1.0  # seconds an answer takes, smoothed
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="desk")
        self.current: Job | None = None
        for module in model.modules() if model is not None else ():
            module.register_forward_pre_hook(self._wanted)

    async def ask(self, work: Callable, ticket: str | None = None):
        """The result of `work()`. A task that is cancelled leaves the queue, and stops its work at the next check.

        Raises: Full, Stopped, or the exception of `work`.
        """
        if len(self.line) >= self.most:
            raise Full
        job = Job(ticket)
        self.line.append(job)
        future = self.thread.submit(self._answer, job, work)
        try:
            return await asyncio.wrap_future(future)
        finally:
            job.stopped.set()
            self.line.remove(job)

    def place(self, ticket: str) -> int | None:
        """How many are answered before the question with this ticket; None where it does not wait."""
        return next((place for place, job in enumerate(self.line) if job.ticket == ticket), None)

    def wait(self, place: int) -> float:
        """Seconds until a question at this place begins to be answered, about."""
        return place * self.mean

    def check(self) -> None:
        """Raises Stopped in the desk's thread where the current work is no longer wanted."""
        job = self.current
        if job is not None and job.stopped.is_set():
            raise Stopped("the client has left")
        if job is not None and time.monotonic() > job.deadline:
            raise Stopped(f"stopped after {self.seconds:.0f} s, the longest that an answer may take")

    def _wanted(self, *_) -> None:
        self.check()

    def _answer(self, job: Job, work: Callable):
        start = time.monotonic()
        job.deadline, self.current = start + self.seconds, job
        try:
            self.check()
            return work()
        finally:
            self.current = None
            self.mean = 0.8 * self.mean + 0.2 * (time.monotonic() - start)
