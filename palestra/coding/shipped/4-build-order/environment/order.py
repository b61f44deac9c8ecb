import sys

for line in open(sys.argv[1]):
    print(line.split(":")[0])
