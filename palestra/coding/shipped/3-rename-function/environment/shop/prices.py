def calc(price, tax):
    return round(price * tax, 2)
