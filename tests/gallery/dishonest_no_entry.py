"""Defines no entry point."""


# expect: load | no function `custom_kernel`
def kernel(data):
    return None
