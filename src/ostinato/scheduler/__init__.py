"""Which request runs how many tokens in the next step: ids and counts only, no torch."""

from ostinato.scheduler.scheduler import Scheduler, TokenEvent

__all__ = ["Scheduler", "TokenEvent"]
