class Bucket:
    def __init__(self, rate, size, clock):
        self.rate, self.size, self.clock = rate, size, clock
        self.tokens, self.last = size, clock()

    def take(self, n=1):
        now = self.clock()
        self.tokens += int((now - self.last) * self.rate)
        self.last = now
        if self.tokens > n:
            self.tokens -= n
            return True
        return False
