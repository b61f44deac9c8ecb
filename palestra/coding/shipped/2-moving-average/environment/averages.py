def averages(values, n):
    return [sum(values[i : i + n]) / n for i in range(len(values))]
