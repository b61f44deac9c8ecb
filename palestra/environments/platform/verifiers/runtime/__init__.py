"""The runtime of a verifier, in a process of its own inside the sandbox. It uses the standard library only: nothing of
ours but this folder is loaded there."""
