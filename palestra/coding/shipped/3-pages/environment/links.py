def links(number, last):
    return " ".join(str(n) for n in range(number - 2, number + 3))
