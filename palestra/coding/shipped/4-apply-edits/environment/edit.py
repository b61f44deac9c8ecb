import json
import sys

lines = open(sys.argv[1]).read().split("\n")
for edit in json.load(open(sys.argv[2])):
    line, column = edit["start"]
    lines[line] = lines[line][:column] + edit["text"]
open(sys.argv[1], "w").write("\n".join(lines))
