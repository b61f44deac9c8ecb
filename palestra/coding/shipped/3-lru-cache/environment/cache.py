class Cache:
    def __init__(self, size):
        self.size = size
        self.items = {}

    def get(self, key):
        return self.items.get(key)

    def put(self, key, value):
        self.items[key] = value
        if len(self.items) > self.size:
            del self.items[next(iter(self.items))]
