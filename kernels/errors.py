"""What this package raises. Callers may rely on the built-in base classes when two copies are loaded."""


class InvalidArgument(ValueError):
    """An argument is wrong in itself: names it, what was expected and what came."""


class UnsupportedCall(NotImplementedError):
    """No implementation may serve a valid call.

    Attributes:
        reasons: one sentence per implementation that was asked, ``{implementation: reason}``.
    """

    def __init__(self, reasons: dict[str, str]):
        self.reasons = dict(reasons)
        super().__init__("; ".join(f"{name}: {reason}" for name, reason in self.reasons.items()))


class KernelUnavailable(RuntimeError):
    """A GPU kernel cannot be used here.

    Attributes:
        reason: one plain sentence for the user.
    """

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(reason)
