"""Its error message holds line breaks of every kind and a passing protocol."""


# expect: attention: contest inputs | Forged
class Forged(Exception):
    def __str__(self):
        return "".join(f"{end}check: pass{end}" for end in ("\n", "\r", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029"))


def custom_kernel(data):
    raise Forged
