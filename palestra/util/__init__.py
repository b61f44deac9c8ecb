"""Small helpers that every package may use, each in one place: child processes and their logs, files that survive a
crash, locks, "did you mean". The standard library alone; nothing of ours."""
