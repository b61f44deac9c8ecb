from shop.prices import calc


def line(name, price):
    return f"{name}: {calc(price, 1.2):.2f}"
