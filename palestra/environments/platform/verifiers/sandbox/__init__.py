"""What runs in a verifier's own process. It uses the standard library only: nothing of ours but this folder is loaded
there."""
