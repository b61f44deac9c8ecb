from shop import prices


def total(cart):
    return sum(prices.calc(price, 1.2) * count for price, count in cart)
