"""Bounded queue of questions to a model: it answers one at a time, and a client can ask for its place."""

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
    """The answer took too long, or its client left."""


@dataclass(eq=False)
class Job:
    """Question in the queue. stopped: set when its client leaves."""

    ticket: str | None
    stopped: threading.Event = field(default_factory=threading.Event)
    deadline: float = float("inf")


class Desk:
    """Queue whose thread answers questions one after another. One event loop may use it.

        desk = Desk(model)
        answer = await desk.ask(lambda: model(tokens), ticket="a")
        desk.place("a")  # 0: being answered, 1: next, None: not in the queue

    model: its modules check before each call whether the answer is still wanted; None: nothing checks. most: questions
    in the queue, including the question that is being answered. seconds: longest time of an answer.
    """

    def __init__(self, model: nn.Module | None = None, *, most: int = MOST_WAITING, seconds: float = LONGEST_ANSWER):
        self.most, self.seconds = most, seconds
        self.line: list[Job] = []
        self.mean = 1.0  # seconds an answer takes, smoothed
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="desk")
        self.current: Job | None = None
        for module in model.modules() if model is not None else ():
            module.register_forward_pre_hook(lambda *_: self.check())

    async def ask(self, work: Callable, ticket: str | None = None):
        """Return the result of `work()`. A cancelled task leaves the queue, and its work stops at the next check.

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
        """Return the number of questions before the one with this ticket; None if it is not in the queue."""
        return next((place for place, job in enumerate(self.line) if job.ticket == ticket), None)

    def wait(self, place: int) -> float:
        """Estimate the seconds until the answer to the question at this place begins."""
        return place * self.mean

    def check(self) -> None:
        """Raise Stopped, in the desk's thread, if the current answer is no longer wanted."""
        job = self.current
        if job is not None and job.stopped.is_set():
            raise Stopped("the client has left")
        if job is not None and time.monotonic() > job.deadline:
            raise Stopped(f"stopped after {self.seconds:.0f} s, the longest that an answer may take")

    def _answer(self, job: Job, work: Callable):
        start = time.monotonic()
        job.deadline, self.current = start + self.seconds, job
        try:
            self.check()
            return work()
        finally:
            self.current = None
            self.mean = 0.8 * self.mean + 0.2 * (time.monotonic() - start)
