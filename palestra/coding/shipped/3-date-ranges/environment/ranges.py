def merge(ranges):
    found = []
    for start, end in ranges:
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def days(ranges):
    return len(ranges)
