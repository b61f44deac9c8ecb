import sys

lines = open(sys.argv[1]).read().split("\n")
index = lines[0].split(",").index(sys.argv[2])
print(sum(float(line.split(",")[index]) for line in lines[1:]))
