def get(document, pointer):
    for name in pointer.split("/"):
        document = document[name]
    return document
