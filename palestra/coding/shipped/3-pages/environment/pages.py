def page(items, number, size):
    return items[number * size : (number + 1) * size]


def count(items, size):
    return len(items) // size
