def merge(base, changes):
    base.update(changes)
    return base
