import json
import sys

from settings import merge

print(json.dumps(merge(*(json.load(open(name)) for name in sys.argv[1:]))))
