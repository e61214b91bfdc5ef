"""Preparers without a thread."""

from collections import deque

from rekindle.engine.scheduler.sampler_queue import Job


class PreparingAtOnce:
    """Runs each job where it is submitted."""

    def start(self) -> None:
        pass

    def submit(self, job: Job, *, is_light: bool) -> None:
        job()

    def close(self) -> None:
        pass


class SteppedPreparer:
    """Runs jobs in `work` only."""

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()
        self.light: list[bool] = []  # of all jobs, in their order

    def start(self) -> None:
        pass

    def submit(self, job: Job, *, is_light: bool) -> None:
        self.jobs.append(job)
        self.light.append(is_light)

    def work(self) -> None:
        self.jobs.popleft()()

    def close(self) -> None:
        while self.jobs:
            self.work()
