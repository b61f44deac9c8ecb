import sys

name, greeting = sys.argv[1:]
print(f"{name}, {greeting}!")
