"""Audits of environments: what is played without any model, and what that says about their rewards.

Begin at `run`.
"""

from palestra.audit.findings import AuditFinding, FindingKind, Severity
from palestra.audit.report import AuditReport
from palestra.audit.run import audit, audit_coding, audit_target
from palestra.audit.settings import AuditSettings
from palestra.config.environment_entries import EnvironmentEntry

__all__ = [
    "AuditFinding",
    "AuditReport",
    "AuditSettings",
    "EnvironmentEntry",
    "FindingKind",
    "Severity",
    "audit",
    "audit_coding",
    "audit_target",
]
