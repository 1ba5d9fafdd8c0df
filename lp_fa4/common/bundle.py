"""Named values that a kernel's roles share."""

from typing import Any


class Bundle:
    """Attributes from keywords, read-only by convention.

    A plain class on purpose: the tracer would thread a namedtuple or ``SimpleNamespace`` through every dynamic branch.
    """

    def __init__(self, **values: Any):
        for name, value in values.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:  # for type checkers: attributes are whatever was given
        raise AttributeError(f"{name} was not given to this Bundle")
