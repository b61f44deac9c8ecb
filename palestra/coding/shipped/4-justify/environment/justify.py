import sys
import textwrap

print(textwrap.fill(sys.stdin.read(), int(sys.argv[1])))
