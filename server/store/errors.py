"""What a store says no with, and how it fails."""

from __future__ import annotations


class StoreError(ValueError):
    """A request that the stored facts do not allow."""


class TokenRefused(StoreError):
    """An enrolment token that is unknown, revoked, expired or used up."""


class UnknownToken(TokenRefused):
    """What was shown is no token of this server's."""


class NameTaken(StoreError):
    """An enrolment under a name that another client has."""


class UpdateRefused(StoreError):
    """An update or calibration for a round that is over, or from a client that is not in it."""


class UnknownRun(StoreError):
    """No run of that id or name."""


class UnknownRound(StoreError):
    """A round that has not begun."""


class UnknownRelease(StoreError):
    """No version of that number, or none that the client was offered."""


class NoVersion(StoreError):
    """The client's run is rolled out in versions, and none of them is for this client now."""


class StoreFailed(OSError):
    """The database cannot be reached or written to. If it broke off while it stored something, that may have
    happened or not; reading the facts again tells."""


class Deposed(StoreFailed):
    """Another server leads by now; nothing was written."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"another server leads since this one did, in epoch {epoch}")
