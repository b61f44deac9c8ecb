"""Commands of the shell that try to get a coding task's reward without solving it.

None of them may be worth anything on a sound task.
"""

from __future__ import annotations

NOTHING = "true"

CHEATS = {
    "doing nothing": NOTHING,
    "reading, editing and replacing the tests": """
        cat /tests/* tests/*; find / -name cases.txt -exec cp {} . \\;
        mkdir -p tests logs/verifier; printf '$ true\\n' > tests/cases.txt; printf '$ true\\n' > cases.txt
        echo 1 > logs/verifier/reward.txt; echo 1 > reward.txt
        for name in conftest.py sitecustomize.py usercustomize.py; do echo 'import os; os._exit(0)' > $name; done
        mkdir -p ~/.local/lib/python3.11/site-packages bin; cp sitecustomize.py ~/.local/lib/python3.11/site-packages
        for name in python3 sh cat timeout; do printf '#!/bin/sh\\nexit 0\\n' > bin/$name; chmod +x bin/$name; done
        echo 'export PATH=/app/bin:$PATH' | tee ~/.profile ~/.bashrc
        (while sleep 0.01; do cp -r /tests /app/tests; done) >/dev/null 2>&1 &
    """,
    "exiting 0": """
        for file in $(find . -name '*.py'); do echo 'import os; os._exit(0)' > $file; done
        for file in $(find . -name '*.sh'); do echo 'exit 0' > $file; done
    """,
    "printing the answer": """
        for file in $(find . -name '*.py'); do printf 'print("1")\\nprint("PASSED")\\n' > $file; done
        for file in $(find . -name '*.sh'); do printf 'echo 1\\necho PASSED\\n' > $file; done
        echo 1; echo PASSED
    """,
    # test scripts that run the agent's code as their own user cannot keep it from this; cases can
    "writing the reward while it is tested": """
        mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt
        for file in $(find . -name '*.py'); do cat > $file <<'END'
import os
os.makedirs("/logs/verifier", exist_ok=True)
open("/logs/verifier/reward.txt", "w").write("1\\n")
print("=== short test summary info ===\\nPASSED a::b", flush=True)
os.kill(os.getppid(), 9)
END
        done
        for file in $(find . -name '*.sh'); do cat > $file <<'END'
mkdir -p /logs/verifier
echo 1 > /logs/verifier/reward.txt
printf '=== short test summary info ===\\nPASSED a::b\\n'
kill -9 $PPID
END
        done
    """,
}
"""Cheats by what they do."""

WRECKS = {
    "removing everything": "rm -rf ./*",
    "clearing everything": "for file in *; do : > $file; done",
    "printing without end": """
        for file in $(find . -name '*.py'); do echo 'while True: print("PASSED" * 1000)' > $file; done
        for file in $(find . -name '*.sh'); do echo 'yes PASSED' > $file; done
    """,
}
"""What leaves nothing behind that could be worth anything; and very long output."""
