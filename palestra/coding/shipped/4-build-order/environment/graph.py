def read(file):
    return dict(line.split(":") for line in file)
