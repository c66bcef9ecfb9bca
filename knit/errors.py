"""The errors a user of knit meets. Each message is one readable line that names setting, value and fix."""

from __future__ import annotations


class KnitError(Exception):
    """Base of all errors raised on purpose. ``exit_code`` is what a command exits with."""

    exit_code = 1


class ConfigError(KnitError):
    """The input is wrong: a setting, a path, a file. Nothing has been started."""

    exit_code = 2


class RunError(KnitError):
    """The run cannot go on: a worker died, a deadline passed, a quota can no longer be met."""


class DeadlineError(RunError):
    """A wait passed its deadline; the message says what was waited for."""


class EngineError(RunError):
    """A rollout engine answered with an error or is gone; names the engine."""


class StoreError(RunError):
    """A trajectory payload is missing, short, corrupt or refused; names key and backend."""


class DuplicateKeyError(StoreError):
    """The key was written before; keys are never reused."""


class MissingUnitError(StoreError):
    """The unit is not (or no longer) in the store."""


class CorruptUnitError(StoreError):
    """The unit was read but is short or fails its checksum."""


class StoreFullError(StoreError):
    """The store has no room: back-pressure, never eviction."""


class PublishError(RunError):
    """A weight publish failed; names the engine that did not confirm and the version it kept.

    ``failed`` are the engines at fault (restart them, or leave them out), ``confirmed`` those that run on
    the new version already.
    """

    failed: tuple[str, ...] = ()
    confirmed: tuple[str, ...] = ()
