def area(width, height):
    print("debug", width, height)
    return width * height
