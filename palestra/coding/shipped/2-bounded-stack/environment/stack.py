class Stack:
    items = []

    def __init__(self, size):
        self.size = size

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()
