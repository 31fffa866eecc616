"""Errors and signals of planned scripts."""


class StepCaptured(BaseException):
    """Raised to end a script after its first training step was captured."""


class PlanError(Exception):
    """Raised for a script that cannot be planned, with a message for users."""


class ScriptEnded(PlanError):
    """Raised for a script that exited before its first training step."""
