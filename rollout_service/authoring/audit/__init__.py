"""The quality of an environment's tasks, found out by running them: `rollout-service env audit`.

`audit_environment` runs an idle agent and the environment's own solution, and returns a report.
"""

from rollout_service.authoring.audit.report import AuditReport, InstanceAudit
from rollout_service.authoring.audit.runner import audit_environment

__all__ = ["AuditReport", "InstanceAudit", "audit_environment"]
