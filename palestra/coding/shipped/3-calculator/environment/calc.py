import sys

left, sign, right = sys.argv[1].split()
print(int(left) + int(right))
