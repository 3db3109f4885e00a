"""Raises what can be neither shown nor pickled."""


# expect: attention: contest inputs | cannot be shown
class Broken(Exception):
    def __init__(self, one, two):
        self.handle = lambda: (one, two)

    def __str__(self):
        raise ValueError("no")


def custom_kernel(data):
    raise Broken(1, 2)
