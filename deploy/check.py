"""`make deploy-check`: every check of `deploy/` that this machine can run, and why the others cannot.

    python deploy/check.py                 all of them
    python deploy/check.py compose unit    some
    python deploy/check.py --list          their names

Nothing of it needs a container daemon, a registry or a GPU. The exit status is 1 if a check fails; one that is skipped
does not count.
"""

from __future__ import annotations

import argparse
import sys
import time

from checks.base import ROOT, CheckFailed, CheckSkipped, Workplace
from checks.files import (
    check_compose,
    check_dockerfile,
    check_kubernetes,
    check_nginx,
    check_prometheus,
    check_unit,
)
from checks.image import check_images
from checks.machine import check_machine
from checks.wheels import check_wheels

CHECKS = {
    "dockerfile": check_dockerfile,
    "compose": check_compose,
    "kubernetes": check_kubernetes,
    "prometheus": check_prometheus,
    "nginx": check_nginx,
    "unit": check_unit,
    "wheels": check_wheels,
    "images": check_images,
    "systemd": check_machine,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the files of deploy/.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"checks to run: {', '.join(CHECKS)} [all]")
    parser.add_argument("--list", action="store_true", help="show their names")
    args = parser.parse_args()
    if args.list:
        print("\n".join(CHECKS))
        return 0
    if unknown := [name for name in args.names if name not in CHECKS]:
        parser.error(f"unknown check {unknown[0]!r}; there are: {', '.join(CHECKS)}")
    work, has_failed = Workplace(ROOT / "build" / "deploy"), False
    for name in args.names or CHECKS:
        began = time.monotonic()
        try:
            verdict, text = "ok", CHECKS[name](work)
        except CheckSkipped as why:
            verdict, text = "skipped", str(why)
        except CheckFailed as why:
            verdict, text, has_failed = "FAILED", str(why), True
        print(f"{verdict:<8} {name:<11} {time.monotonic() - began:4.0f} s  {text}", flush=True)
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
