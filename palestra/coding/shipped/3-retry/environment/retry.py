import time


def retry(times):
    def decorate(function):
        def wrapper():
            for _ in range(times):
                try:
                    return function()
                except:
                    time.sleep(1)
        return wrapper
    return decorate
