import fnmatch
import sys

for line in sys.stdin:
    if fnmatch.fnmatch(line.strip(), sys.argv[1]):
        print(line.strip())
