"""Pictures that are drawn for a task, and questions about them. Begin at `environment`."""
