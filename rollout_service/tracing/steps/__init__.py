"""The steps of attempts: encoded, saved once an attempt has ended, and read again."""

from rollout_service.tracing.steps.archive import StepArchive as StepArchive
from rollout_service.tracing.steps.writer import StepWriter as StepWriter
