"""The steps of attempts: encoded, saved once an attempt has ended, and read again."""

from rollout_service.observability.tracing.steps.archive import StepArchive as StepArchive
from rollout_service.observability.tracing.steps.writer import StepWriter as StepWriter
