"""What runs in a verifier's own process. The standard library only: nothing of ours but this folder is loaded there."""
