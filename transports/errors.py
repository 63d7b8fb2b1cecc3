"""Errors of stores and carriers."""

from __future__ import annotations

from engine.errors import DteError


class StoreError(DteError):
    """The store could not do what was asked."""

    code = "store"


class StoreUnavailable(StoreError):
    """The store did not answer within the deadline, or kept refusing; trying later may work."""

    code = "store-unavailable"


class ObjectNotFound(StoreError):
    """No object has this key."""

    code = "object-not-found"


class KeyConflict(StoreError):
    """An object and a prefix of other objects want the same name (`a` beside `a/b`), which directories cannot hold."""

    code = "key-conflict"


class ObjectTooLarge(StoreError):
    """The object is longer than the caller allows."""

    code = "object-too-large"


class ObjectCorrupt(StoreError):
    """The bytes received do not have the expected length or hash."""

    code = "object-corrupt"


class StoreFull(StoreError):
    """No space is left, or a quota is exceeded."""

    code = "store-full"


class StoreForbidden(StoreError):
    """The credentials are missing, wrong, or not allowed to do this."""

    code = "store-forbidden"
