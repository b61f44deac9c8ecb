class Scheduler:
    def __init__(self):
        self.now = 0
        self.calls = []

    def at(self, time, call, *args):
        self.calls.append((time, call, args))

    def run(self, until):
        for time, call, args in sorted(self.calls):
            call(*args)
