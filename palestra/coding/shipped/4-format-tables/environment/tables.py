import sys

for line in sys.stdin:
    print(" | ".join(cell.strip() for cell in line.split("|")))
