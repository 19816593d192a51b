"""Why a step has not been done."""


class StepError(Exception):
    """A step that cannot be done, for a reason that its author can change."""


class FullError(Exception):
    """A step that wrote more than it may."""
