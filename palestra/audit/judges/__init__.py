"""What the episodes of an audit say: each judge reads them and returns findings, and plays nothing."""
