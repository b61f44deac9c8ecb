"""Sandboxes on this machine, in namespaces of the Linux kernel. Begin at `backend`."""
