"""Engine workers: where they run, the link to each, the messages and files that go over it. Begin at `supervisor`."""
