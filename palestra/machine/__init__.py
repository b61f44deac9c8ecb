"""What this machine and this installation have, and what works here."""
