"""Audits of environments: what is played without any model, and what that says about their rewards.

Begin at `run`.
"""

from palestra.audit.findings import Finding, FindingKind, Severity
from palestra.audit.report import AuditReport
from palestra.audit.run import audit, audit_coding
from palestra.audit.settings import AuditSettings

__all__ = ["AuditReport", "AuditSettings", "Finding", "FindingKind", "Severity", "audit", "audit_coding"]
